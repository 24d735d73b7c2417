//! Last part of the demo: a Linux guest with pool memory, and the move of its slices. It has a rack
//! of its own, two hosts on one small EMC; where this machine's KVM cannot run Linux, that rack and
//! its guest run inside an emulated host.

mod emulated;
mod told;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use emulated_host::{
    Artifacts, Initrd,
    nodes::{NumaReport, PRINT_NODES_SCRIPT},
};

use super::{
    Patience, Programs, UP_WITHIN, all_up,
    ask::Ask,
    note,
    rack::{Plan, Rack},
    say,
    scratch::Scratch,
    service::{Service, Services, command},
};
use crate::failure::Failure;

pub use self::{emulated::Inside, told::GuestTold};

/// Slices of the guest; its successor gets the same ones.
const RACK: &str = r#"
[[emc]]
name = "emc0"
slices = 2

[[host]]
name = "h0"
cores = 4
local_mib = 4096
emcs = ["emc0"]
[[host]]
name = "h1"
cores = 4
local_mib = 4096
emcs = ["emc0"]
"#;
/// Where the guest runs, and where its slices go afterwards.
const HOSTS: [&str; 2] = ["h0", "h1"];
/// Programs of the hosts.
const VMS: [&str; 2] = ["guest", "next"];
/// All that a VM of this act asks for.
const WANTED: [&str; 6] = ["--pool", "2GiB", "--local", "512MiB", "--cores", "2"];

/// As root, the guest's VMM becomes this user, which owns nothing.
const NOBODY: [&str; 4] = ["--uid", "65534", "--gid", "65534"];

/// The kernel that the guest has.
const KERNEL: &str = "6.12";
/// Script of the guest: it prints its nodes, and waits for the power button.
fn guest_script() -> String {
    format!("exec 3< /dev/input/event0\n{PRINT_NODES_SCRIPT}\nhead -c 1 <&3 > /dev/null")
}

/// How long this machine's KVM may take to bring a guest to its first words before it is taken for one that runs no Linux.
const FIRST_WORDS_WITHIN: Duration = Duration::from_secs(20);
/// Time for a guest to print its nodes inside an emulated host.
const TOLD_WITHIN: Duration = Duration::from_secs(240);
/// How long a guest may take to switch itself off, and its slices to be scrubbed and free.
const ENDED_WITHIN: Duration = Duration::from_secs(60);

/// Kernel and initrd of a guest.
#[derive(Clone, Debug)]
pub struct Boot {
    /// A kernel.
    pub kernel: PathBuf,
    /// File system whose `init` runs [`guest_script`].
    pub initrd: PathBuf,
}

/// Plays the act where it can be played.
///
/// # Errors
/// Something is missing, a program fails, or the guest is not as it should be.
pub fn play(
    programs: &Programs,
    patience: &Patience,
    scratch: &Scratch,
    bed: &Artifacts,
) -> Result<GuestTold, Failure> {
    say("a Linux guest whose pool memory is a node without processors");
    let initrd = Initrd::for_guest(bed, KERNEL, &guest_script())?;
    let boot = Boot { kernel: bed.kernel(KERNEL), initrd: scratch.file("guest.initrd") };
    initrd.pack(&boot.initrd)?;
    match boots_here(programs, patience, scratch, &boot)? {
        Ok(()) => return act(programs, patience, &boot),
        Err(why) => note(&format!("no Linux guest comes up on this machine itself: {why}")),
    }
    note("so a host is emulated instead, with a KVM and a rack of its own");
    emulated::play(programs, patience, bed, &initrd)
}

/// Whether a guest comes to its first words on this machine, or why not.
fn boots_here(
    programs: &Programs,
    patience: &Patience,
    scratch: &Scratch,
    boot: &Boot,
) -> Result<Result<(), String>, Failure> {
    let console = scratch.file("probe.console");
    let mut run = command(&programs.vmm);
    run.args(["run", "--vm", "probe", "--standalone", "--memory", "size=512MiB"]);
    let mut vmm = launch(run, boot, &console, scratch)?;
    let seen = patience.until("the first words of a guest", FIRST_WORDS_WITHIN, || {
        Ok(vmm.ended()?.is_some() || !told(&console).kernel.is_empty())
    });
    match seen {
        Ok(_) if vmm.ended()?.is_none() => Ok(Ok(())),
        Ok(_) => Ok(Err(vmm.last_words())),
        Err(late @ Failure::Late { .. }) => Ok(Err(late.to_string())),
        Err(other) => Err(other),
    }
}

/// Boots a guest in a rack of its own: it prints its nodes, is stopped, and its slices move to
/// another host.
///
/// # Errors
/// A program fails, or something does not happen in time.
pub fn act(programs: &Programs, patience: &Patience, boot: &Boot) -> Result<GuestTold, Failure> {
    let scratch = Scratch::new()?;
    let rack = Plan::of(RACK, "the guest's rack")?.placed(&scratch)?;
    let mut services = Services::new(programs, &rack, &scratch);
    let told = with_rack(programs, patience, boot, &scratch, &rack, &mut services);
    let told = told.inspect_err(|_| services.print_last_words());
    let stopped = services.stop();
    let cleared = scratch.clear();
    told.and_then(|told| stopped.and(cleared).map(|()| told))
}

fn with_rack(
    programs: &Programs,
    patience: &Patience,
    boot: &Boot,
    scratch: &Scratch,
    rack: &Rack,
    services: &mut Services<'_>,
) -> Result<GuestTold, Failure> {
    let ask = Ask::new(programs, rack);
    services.init_rack()?;
    services.start_manager()?;
    patience.until("an answer of the manager", UP_WITHIN, || ask.answers())?;
    HOSTS.iter().try_for_each(|host| services.start_agent(host))?;
    patience.until("every host up", UP_WITHIN, || all_up(&ask))?;
    note(&format!("a small rack is up: {}", rack.summary()));
    reserve(&ask, 0)?;
    let slices = ask.slices_of(HOSTS[0])?;
    let told = live(programs, patience, boot, scratch)?;
    patience.until("the guest's slices back", ENDED_WITHIN, || {
        Ok(ask.nothing_drains()? && ask.slices_of(HOSTS[0])?.is_empty())
    })?;
    reserve(&ask, 1)?;
    if ask.slices_of(HOSTS[1])? != slices {
        return Err(Failure::Result(format!("{} did not get the slices of the guest", HOSTS[1])));
    }
    let [from, to] = HOSTS;
    slices.iter().for_each(|slice| note(&format!("slice {slice}: {from} → {to}")));
    ask.order(&["release", VMS[1]])?;
    Ok(told)
}

fn reserve(ask: &Ask<'_>, which: usize) -> Result<(), Failure> {
    let (host, vm) = (HOSTS[which], VMS[which]);
    let who = ["reserve", "--host", host, "--vm", vm, "--request-id", vm, "--wait-ready"];
    ask.order(&[&who[..], &WANTED].concat())?;
    ask.order(&["commit", vm])
}

/// The guest's life, from its first words to its power button.
fn live(
    programs: &Programs,
    patience: &Patience,
    boot: &Boot,
    scratch: &Scratch,
) -> Result<GuestTold, Failure> {
    let (console, run_dir) = (scratch.file("guest.console"), scratch.file("vmm"));
    let mut run = command(&programs.vmm);
    run.args(["run", "--vm", VMS[0], "--cpus", "2", "--agent"]);
    run.arg(scratch.runtime_of(HOSTS[0]).join("host-memory.sock"));
    let mut vmm = launch(run, boot, &console, scratch)?;
    let heard = patience.until("a guest's word of its nodes", TOLD_WITHIN, || {
        Ok(vmm.ended()?.is_some() || !told(&console).kernel.is_empty())
    });
    let seen = GuestTold::of(&told(&console));
    let wrong =
        |why: String| Failure::Result(format!("{why}:\n{}\n{}", vmm.last_words(), last_lines(&console)));
    match heard {
        Err(late @ Failure::Late { .. }) => return Err(wrong(late.to_string())),
        other => other?,
    };
    seen.lines().iter().for_each(|line| note(line));
    seen.is_as_asked_for().map_err(wrong)?;
    let mut stop = command(&programs.vmm);
    stop.args(["stop", VMS[0], "--run-dir"]).arg(&run_dir);
    let pressed = Instant::now();
    let stopped = stop.status().map_err(Failure::start("vmm-plugin"))?;
    patience.until("the guest's end", ENDED_WITHIN, || Ok(vmm.ended()?.is_some()))?;
    let ended = pressed.elapsed();
    let status = vmm.ended()?.filter(|status| !status.success() || !stopped.success());
    if let Some(status) = status {
        let words = format!("{}\n{}", vmm.last_words(), last_lines(&console));
        return Err(Failure::Result(format!("the guest did not end well: {status}:\n{words}")));
    }
    note(&format!(
        "its power button was pressed, and it switched itself off within {:.1} s",
        ended.as_secs_f64()
    ));
    Ok(seen)
}

/// Adds the common options of all guests to a command, and starts it.
fn launch(
    mut run: std::process::Command,
    boot: &Boot,
    console: &Path,
    scratch: &Scratch,
) -> Result<Service, Failure> {
    if rustix::process::geteuid().is_root() {
        run.args(NOBODY);
    }
    run.arg("--run-dir").arg(scratch.file("vmm")).arg("--kernel").arg(&boot.kernel);
    run.arg("--initrd").arg(&boot.initrd).args(["--cmdline", "console=ttyS0 quiet panic=-1 pci=off"]);
    run.arg("--serial").arg(format!("file={}", console.display()));
    Service::start(&mut run, scratch.file("vmm.log"))
}

fn told(console: &Path) -> NumaReport {
    NumaReport::parse(&said(console))
}

/// Nothing, until there is something.
fn said(console: &Path) -> String {
    fs::read(console).map(|said| String::from_utf8_lossy(&said).into_owned()).unwrap_or_default()
}

fn last_lines(console: &Path) -> String {
    let said = said(console);
    let lines: Vec<&str> = said.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
