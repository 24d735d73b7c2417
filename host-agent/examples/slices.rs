//! The slices of this machine's CXL memory, by hand: for whoever brings up a host, and to see each step of the agent's on a new
//! kernel. It changes what a running agent has, so let none run beside it.

use std::{num::NonZeroU64, process::ExitCode, sync::Arc};

use host_agent::host::{
    Host, HostError,
    cxl::{CxlError, Device, Discovered, SliceName},
    dax::Dax,
    slices::{SliceError, Slices},
    sysfs::Sysfs,
};
use pool::protocol::{Handle, Holding};
use units::{Epoch, SliceId};

const USAGE: &str = "usage: slices list | churn | WISH NAME   (NAME is cxl:SERIAL:INDEX)
  churn brings all slices online and offline again and again, all at the same time
  a slice's device:    WISH is devdax, kmem or remove
  as a VM's memory:    WISH is online, adopt (without a look for zeros), offline, revoke (also from who has it) or scrub";

/// How often a churn brings each slice online and offline.
const ROUNDS: u64 = 10;

type Answer = Result<(), Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let done = match &*words.iter().map(String::as_str).collect::<Vec<_>>() {
        ["list"] => list(),
        ["churn"] => churn(),
        [wish @ ("devdax" | "kmem" | "remove"), name] => device(wish, name),
        [wish @ ("online" | "adopt" | "offline" | "revoke" | "scrub"), name] => memory(wish, name),
        _ => Err(USAGE.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", units::chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn find() -> Result<Discovered, CxlError> {
    Discovered::find(&Sysfs::at("/sys"))
}

fn list() -> Answer {
    find()?.devices.iter().try_for_each(show)
}

fn show(device: &Device) -> Answer {
    println!("{} serial {} with {}", device.name, device.serial, device.bytes);
    match &device.slices {
        Err(problem) => println!("  problem: {}", units::chain(problem)),
        Ok(slices) => show_slices(slices)?,
    }
    Ok(())
}

fn show_slices(slices: &Slices) -> Result<(), SliceError> {
    let region = slices.region();
    let (count, align, node) = (slices.count(), slices.align(), slices.node());
    println!("  {} at {:#x}: {count} slices, aligned to {align}, node {node}", region.name, region.base);
    for (index, found) in slices.found()? {
        let driver = found.driver.map_or("no driver", |driver| driver.module());
        println!("  slice {index}: {} with {driver}", found.device);
    }
    Ok(())
}

fn churn() -> Answer {
    let cxl = Arc::new(find()?);
    let host = Dax::new(Arc::clone(&cxl), None, NonZeroU64::MAX);
    let usable = cxl.devices.iter().filter_map(|device| Some((&device.serial, device.slices.as_ref().ok()?)));
    let names: Vec<_> = usable
        .flat_map(|(serial, slices)| (0..slices.count()).map(move |index| format!("cxl:{serial}:{index}")))
        .collect();
    let done: Result<Vec<_>, _> = std::thread::scope(|scope| {
        let ids = (0..).map(SliceId).zip(&names);
        let threads: Vec<_> = ids
            .map(|(id, name)| {
                scope.spawn({
                    let host = &host;
                    move || to_and_fro(host, id, name)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("it only returns")).collect()
    });
    println!("{} slices, {ROUNDS} rounds", done?.len());
    Ok(())
}

fn to_and_fro(host: &Dax, slice: SliceId, name: &str) -> Result<(), HostError> {
    let handle = Handle::new("", name);
    for epoch in 0..ROUNDS {
        let holding = Holding { slice, epoch: Epoch(epoch) };
        host.online(holding, &handle, false)?;
        host.offline(holding, &handle, true)?;
    }
    Ok(())
}

fn device(wish: &str, name: &str) -> Answer {
    let SliceName { serial, index } = name.parse()?;
    let found = find()?;
    let slices = found.slices(&serial)?;
    match wish {
        "devdax" => println!("{}", slices.ensure_devdax(index)?.device),
        "kmem" => println!("{}", slices.ensure_kmem(index)?.device),
        _ => slices.remove(index)?,
    }
    Ok(())
}

fn memory(wish: &str, name: &str) -> Answer {
    let host = Dax::new(Arc::new(find()?), None, NonZeroU64::MAX);
    let (holding, handle) = (Holding { slice: SliceId(0), epoch: Epoch(1) }, Handle::new("", name));
    match wish {
        "online" => host.online(holding, &handle, true)?,
        "adopt" => host.online(holding, &handle, false)?,
        "offline" => host.offline(holding, &handle, true)?,
        "revoke" => host.offline(holding, &handle, false)?,
        _ => println!("{} scrubbed", host.scrub(holding, &handle)?),
    }
    Ok(())
}
