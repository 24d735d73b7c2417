//! Last part of the demo: a Linux guest with pool memory, and the move of its slices. It has a rack
//! of its own, two hosts on one small EMC; where this machine's KVM cannot run Linux, that rack and
//! its guest run inside an emulated host.

mod emulated;
mod report;

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
    Interrupt, Programs, UP_TIMEOUT, all_up, print_details, print_heading,
    rack::{Plan, Rack},
    scratch::Scratch,
    service::{self, Services, command},
    tarn_cli::TarnCli,
};
use crate::failure::Failure;
use local_rack::Process;

pub use self::{emulated::DemoGuestArgs, report::GuestReport};

/// Rack of the guest: all slices are used by the guest, and then by its successor.
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
/// Host of the guest, and host that gets its slices afterwards.
const HOSTS: [&str; 2] = ["h0", "h1"];
/// VMs of these hosts.
const VMS: [&str; 2] = ["guest", "next"];
/// Options of each reservation.
const RESERVATION: [&str; 6] = ["--pool", "2GiB", "--local", "512MiB", "--cores", "2"];

/// Unprivileged user of the guest's VMM if the demo runs as root.
const NOBODY: [&str; 4] = ["--uid", "65534", "--gid", "65534"];

/// Kernel of the guest.
const KERNEL: &str = "6.12";
/// Script of the guest: it prints its nodes, and waits for the power button.
fn guest_script() -> String {
    format!("exec 3< /dev/input/event0\n{PRINT_NODES_SCRIPT}\nhead -c 1 <&3 > /dev/null")
}

/// Time limit for the first output of a guest on this machine, after which its KVM counts as unable
/// to boot Linux.
const FIRST_OUTPUT_TIMEOUT: Duration = Duration::from_secs(20);
/// Time for a guest to print its nodes inside an emulated host.
const NODES_TIMEOUT: Duration = Duration::from_secs(240);
/// Time limit for a guest to power off, and for its slices to be scrubbed and free.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// Kernel and initrd of a guest.
#[derive(Clone, Debug)]
pub struct Boot {
    /// Kernel.
    pub kernel: PathBuf,
    /// File system whose `init` runs [`guest_script`].
    pub initrd: PathBuf,
}

/// Runs the guest on this machine or, if its KVM cannot boot Linux, in an emulated host.
///
/// # Errors
/// A program is missing or fails, or the NUMA nodes of the guest are wrong.
pub fn run(
    programs: &Programs,
    interrupt: &Interrupt,
    scratch: &Scratch,
    artifacts: &Artifacts,
) -> Result<GuestReport, Failure> {
    print_heading("a Linux guest with its pool memory as a NUMA node without CPUs");
    let initrd = Initrd::for_guest(artifacts, KERNEL, &guest_script())?;
    let boot = Boot { kernel: artifacts.kernel(KERNEL), initrd: scratch.file("guest.initrd") };
    initrd.pack(&boot.initrd)?;
    match boots_on_this_machine(programs, interrupt, scratch, &boot)? {
        Ok(()) => return run_guest_rack(programs, interrupt, &boot),
        Err(why) => print_details(&format!("this machine cannot boot a Linux guest: {why}")),
    }
    print_details("starting an emulated host with KVM and its own rack instead");
    emulated::run(programs, interrupt, artifacts, &initrd)
}

/// Returns whether a guest prints output on this machine; the inner error is the reason if not.
fn boots_on_this_machine(
    programs: &Programs,
    interrupt: &Interrupt,
    scratch: &Scratch,
    boot: &Boot,
) -> Result<Result<(), String>, Failure> {
    let console = scratch.file("probe.console");
    let mut run = command(&programs.vmm);
    run.args(["run", "--vm", "probe", "--standalone", "--memory", "size=512MiB"]);
    let mut vmm = launch(run, boot, &console, scratch)?;
    let waited = interrupt.wait_until("the first output of a guest", FIRST_OUTPUT_TIMEOUT, || {
        Ok(vmm.exit_status()?.is_some() || !numa_report(&console).kernel.is_empty())
    });
    match waited {
        Ok(_) if vmm.exit_status()?.is_none() => Ok(Ok(())),
        Ok(_) => Ok(Err(vmm.log_tail())),
        Err(timed_out @ Failure::TimedOut { .. }) => Ok(Err(timed_out.to_string())),
        Err(other) => Err(other),
    }
}

/// Boots a guest in its own rack: it prints its nodes, is stopped, and its slices move to
/// another host.
///
/// # Errors
/// A program fails, or a time limit expires.
pub fn run_guest_rack(
    programs: &Programs,
    interrupt: &Interrupt,
    boot: &Boot,
) -> Result<GuestReport, Failure> {
    let scratch = Scratch::new()?;
    let rack = Plan::parse(RACK, "the guest's rack")?.deploy(&scratch)?;
    let mut services = Services::new(programs, &rack, &scratch);
    let report = run_on_rack(programs, interrupt, boot, &scratch, &rack, &mut services);
    let report = report.inspect_err(|_| services.print_log_tails());
    let stopped = services.stop();
    let removed = scratch.remove();
    report.and_then(|report| stopped.and(removed).map(|()| report))
}

fn run_on_rack(
    programs: &Programs,
    interrupt: &Interrupt,
    boot: &Boot,
    scratch: &Scratch,
    rack: &Rack,
    services: &mut Services<'_>,
) -> Result<GuestReport, Failure> {
    let cli = TarnCli::new(programs, rack);
    services.init_rack()?;
    services.start_manager()?;
    interrupt.wait_until("a reply of the manager", UP_TIMEOUT, || cli.is_manager_ready())?;
    HOSTS.iter().try_for_each(|host| services.start_agent(host))?;
    interrupt.wait_until("all hosts to be up", UP_TIMEOUT, || all_up(&cli))?;
    print_details(&format!("a small rack is up: {}", rack.summary()));
    reserve(&cli, 0)?;
    let slices = cli.slices_of(HOSTS[0])?;
    let report = run_guest(programs, interrupt, boot, scratch)?;
    interrupt.wait_until("the slices of the guest to be free", STOP_TIMEOUT, || {
        Ok(cli.has_no_draining_slice()? && cli.slices_of(HOSTS[0])?.is_empty())
    })?;
    reserve(&cli, 1)?;
    if cli.slices_of(HOSTS[1])? != slices {
        return Err(Failure::Result(format!("{} did not get the slices of the guest", HOSTS[1])));
    }
    let [from, to] = HOSTS;
    slices.iter().for_each(|slice| print_details(&format!("slice {slice}: {from} → {to}")));
    cli.execute(&["release", VMS[1]])?;
    Ok(report)
}

fn reserve(cli: &TarnCli<'_>, index: usize) -> Result<(), Failure> {
    let (host, vm) = (HOSTS[index], VMS[index]);
    let target = ["reserve", "--host", host, "--vm", vm, "--request-id", vm, "--wait-ready"];
    cli.execute(&[&target[..], &RESERVATION].concat())?;
    cli.execute(&["commit", vm])
}

/// Boots the guest, checks its nodes and powers it off.
fn run_guest(
    programs: &Programs,
    interrupt: &Interrupt,
    boot: &Boot,
    scratch: &Scratch,
) -> Result<GuestReport, Failure> {
    let (console, run_dir) = (scratch.file("guest.console"), scratch.file("vmm"));
    let mut run = command(&programs.vmm);
    run.args(["run", "--vm", VMS[0], "--cpus", "2", "--agent"]);
    run.arg(scratch.runtime_dir(HOSTS[0]).join("host-memory.sock"));
    let mut vmm = launch(run, boot, &console, scratch)?;
    let waited = interrupt.wait_until("the list of nodes of a guest", NODES_TIMEOUT, || {
        Ok(vmm.exit_status()?.is_some() || !numa_report(&console).kernel.is_empty())
    });
    let report = GuestReport::from_numa_report(&numa_report(&console));
    let failure =
        |why: String| Failure::Result(format!("{why}:\n{}\n{}", vmm.log_tail(), last_lines(&console)));
    match waited {
        Err(timed_out @ Failure::TimedOut { .. }) => return Err(failure(timed_out.to_string())),
        other => other?,
    };
    report.lines().iter().for_each(|line| print_details(line));
    report.check_nodes().map_err(failure)?;
    let mut stop = command(&programs.vmm);
    stop.args(["stop", VMS[0], "--run-dir"]).arg(&run_dir);
    let pressed_at = Instant::now();
    let stopped = stop.status().map_err(Failure::start("vmm-plugin"))?;
    interrupt.wait_until("the guest to power off", STOP_TIMEOUT, || Ok(vmm.exit_status()?.is_some()))?;
    let elapsed = pressed_at.elapsed();
    let status = vmm.exit_status()?.filter(|status| !status.success() || !stopped.success());
    if let Some(status) = status {
        let details = format!("{}\n{}", vmm.log_tail(), last_lines(&console));
        return Err(Failure::Result(format!("the guest failed: {status}:\n{details}")));
    }
    print_details(&format!(
        "its power button was pressed, and it powered off after {:.1} s",
        elapsed.as_secs_f64()
    ));
    Ok(report)
}

/// Adds the common options of all guests to a command, and starts it.
fn launch(
    mut run: std::process::Command,
    boot: &Boot,
    console: &Path,
    scratch: &Scratch,
) -> Result<Process, Failure> {
    if rustix::process::geteuid().is_root() {
        run.args(NOBODY);
    }
    run.arg("--run-dir").arg(scratch.file("vmm")).arg("--kernel").arg(&boot.kernel);
    run.arg("--initrd").arg(&boot.initrd).args(["--cmdline", "console=ttyS0 quiet panic=-1 pci=off"]);
    run.arg("--serial").arg(format!("file={}", console.display()));
    service::start("vmm-plugin", &mut run, scratch.file("vmm.log"))
}

fn numa_report(console: &Path) -> NumaReport {
    NumaReport::parse(&console_output(console))
}

/// Returns the output so far; empty if there is none.
fn console_output(console: &Path) -> String {
    fs::read(console).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn last_lines(console: &Path) -> String {
    let output = console_output(console);
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
