//! The slices of this machine's CXL memory, by hand: for whoever brings up a host, and to see each step of the agent's on a new
//! kernel. It changes what a running agent has, so let none run beside it.

use std::process::ExitCode;

use host_agent::host::{
    cxl::{CxlError, Device, Discovered, SliceName},
    slices::{SliceError, Slices},
    sysfs::Sysfs,
};

const USAGE: &str = "usage: slices list | devdax NAME | kmem NAME | remove NAME   (NAME is cxl:SERIAL:INDEX)";

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let done = match &*words.iter().map(String::as_str).collect::<Vec<_>>() {
        ["list"] => list(),
        [wish, name] => wanted(wish, name),
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

type Answer = Result<(), Box<dyn std::error::Error>>;

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
    println!(
        "  {} at {:#x}: {} slices, aligned to {}, node {}",
        region.name,
        region.base,
        slices.count(),
        slices.align(),
        slices.node()
    );
    for (index, found) in slices.found()? {
        let driver = found.driver.map_or("no driver", |driver| driver.module());
        println!("  slice {index}: {} with {driver}", found.device);
    }
    Ok(())
}

fn wanted(wish: &str, name: &str) -> Answer {
    let SliceName { serial, index } = name.parse()?;
    let found = find()?;
    let slices = found.slices(&serial)?;
    match wish {
        "devdax" => println!("/dev/{}", slices.ensure_devdax(index)?.device),
        "kmem" => println!("{}", slices.ensure_kmem(index)?.device),
        "remove" => slices.remove(index)?,
        _ => return Err(USAGE.into()),
    }
    Ok(())
}
