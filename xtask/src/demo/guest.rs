//! Last part of the demo: a Linux guest with pool memory. After the guest has ended, its slices
//! move to another host. This part uses a separate rack of two hosts and one small EMC. If KVM on
//! this machine cannot boot Linux, the rack and the guest run inside an emulated host.

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
    Interrupt, Programs, START_TIMEOUT, are_all_hosts_up, print_details, print_heading,
    rack::{DemoPlan, Rack},
    scratch::ScratchFolders,
    service::{self, Services, new_command},
    tarn_cli::TarnCli,
};
use crate::failure::Failure;
use local_rack::Process;

pub use self::{emulated::DemoGuestArgs, report::GuestReport};

/// rack.toml of the guest's rack. The guest uses all slices; afterwards, a second VM uses all
/// slices.
const RACK_TOML: &str = r#"
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
/// Host of the guest, and host of the second VM.
const HOSTS: [&str; 2] = ["h0", "h1"];
/// Names of the guest and of the second VM.
const VMS: [&str; 2] = ["guest", "next"];
/// Options of both reservations.
const RESERVE_OPTIONS: [&str; 6] = ["--pool", "2GiB", "--local", "512MiB", "--cores", "2"];

/// Options that run the VMM as an unprivileged user. Used if the demo runs as root.
const UNPRIVILEGED_USER_OPTIONS: [&str; 4] = ["--uid", "65534", "--gid", "65534"];

/// Version of the guest kernel.
const KERNEL_VERSION: &str = "6.12";
/// Returns the script of the guest, which prints its NUMA nodes and waits for the power button.
fn guest_script() -> String {
    format!("exec 3< /dev/input/event0\n{PRINT_NODES_SCRIPT}\nhead -c 1 <&3 > /dev/null")
}

/// Time limit for the first output of a guest. If it expires, KVM on this machine is considered
/// unable to boot Linux.
const FIRST_OUTPUT_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit for a guest to print its NUMA nodes. It is long because of the emulated host.
const NODES_TIMEOUT: Duration = Duration::from_secs(240);
/// Time limit for a guest to power off, and for its slices to be scrubbed and free.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// Kernel and initrd of a guest.
#[derive(Clone, Debug)]
pub struct BootFiles {
    /// Path of the kernel.
    pub kernel: PathBuf,
    /// Path of the initrd, whose `init` runs [`guest_script`].
    pub initrd: PathBuf,
}

/// Runs the guest on this machine. If KVM on this machine cannot boot Linux, runs the guest in an
/// emulated host.
///
/// # Errors
/// Returns an error if a program is missing or fails, or if the NUMA nodes of the guest are wrong.
pub fn run(
    programs: &Programs,
    interrupt: &Interrupt,
    scratch: &ScratchFolders,
    artifacts: &Artifacts,
) -> Result<GuestReport, Failure> {
    print_heading("a Linux guest with its pool memory as a NUMA node without CPUs");
    let initrd = Initrd::for_guest(artifacts, KERNEL_VERSION, &guest_script())?;
    let boot =
        BootFiles { kernel: artifacts.kernel_path(KERNEL_VERSION), initrd: scratch.file("guest.initrd") };
    initrd.pack(&boot.initrd)?;
    match can_boot_guests(programs, interrupt, scratch, &boot)? {
        Ok(()) => return run_guest_rack(programs, interrupt, &boot),
        Err(reason) => print_details(&format!("KVM of this machine cannot boot a Linux guest: {reason}")),
    }
    print_details(
        "continuing on an emulated host, which has its own KVM and rack; this takes longer and shows the same",
    );
    emulated::run(programs, interrupt, artifacts, &initrd)
}

/// Checks whether this machine can boot a Linux guest. The inner error is the reason if it cannot.
fn can_boot_guests(
    programs: &Programs,
    interrupt: &Interrupt,
    scratch: &ScratchFolders,
    boot: &BootFiles,
) -> Result<Result<(), String>, Failure> {
    let console = scratch.file("probe.console");
    let mut run = new_command(&programs.vmm);
    run.args(["run", "--vm", "probe", "--standalone", "--memory", "size=512MiB"]);
    let mut vmm = start_vmm(run, boot, &console, scratch)?;
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

/// Boots a guest in a separate rack, checks its NUMA nodes, stops the guest, and moves its slices
/// to another host.
///
/// # Errors
/// Returns an error if a program fails or a time limit expires.
pub fn run_guest_rack(
    programs: &Programs,
    interrupt: &Interrupt,
    boot: &BootFiles,
) -> Result<GuestReport, Failure> {
    let scratch = ScratchFolders::new()?;
    let rack = DemoPlan::parse(RACK_TOML, "the guest's rack")?.deploy(&scratch)?;
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
    boot: &BootFiles,
    scratch: &ScratchFolders,
    rack: &Rack,
    services: &mut Services<'_>,
) -> Result<GuestReport, Failure> {
    let cli = TarnCli::new(programs, rack);
    services.init_rack()?;
    services.start_manager()?;
    interrupt.wait_until("a reply of the manager", START_TIMEOUT, || cli.is_manager_ready())?;
    HOSTS.iter().try_for_each(|host| services.start_agent(host))?;
    interrupt.wait_until("all hosts to be up", START_TIMEOUT, || are_all_hosts_up(&cli))?;
    print_details(&format!("a small rack is up: {}", rack.summary()));
    reserve(&cli, 0)?;
    let slices = cli.slices_of(HOSTS[0])?;
    let report = run_guest(programs, interrupt, boot, scratch)?;
    interrupt.wait_until("the slices of the guest to be free", STOP_TIMEOUT, || {
        Ok(cli.has_no_draining_slice()? && cli.slices_of(HOSTS[0])?.is_empty())
    })?;
    reserve(&cli, 1)?;
    if cli.slices_of(HOSTS[1])? != slices {
        return Err(Failure::BadResult(format!("host {} did not receive the slices of the guest", HOSTS[1])));
    }
    let [from, to] = HOSTS;
    slices.iter().for_each(|slice| print_details(&format!("slice {slice}: {from} → {to}")));
    cli.execute(&["release", VMS[1]])?;
    Ok(report)
}

fn reserve(cli: &TarnCli<'_>, index: usize) -> Result<(), Failure> {
    let (host, vm) = (HOSTS[index], VMS[index]);
    let target = ["reserve", "--host", host, "--vm", vm, "--request-id", vm, "--wait-ready"];
    cli.execute(&[&target[..], &RESERVE_OPTIONS].concat())?;
    cli.execute(&["commit", vm])
}

/// Boots the guest, checks its NUMA nodes and powers the guest off.
fn run_guest(
    programs: &Programs,
    interrupt: &Interrupt,
    boot: &BootFiles,
    scratch: &ScratchFolders,
) -> Result<GuestReport, Failure> {
    let (console, run_dir) = (scratch.file("guest.console"), scratch.file("vmm"));
    let mut run = new_command(&programs.vmm);
    run.args(["run", "--vm", VMS[0], "--cpus", "2", "--agent"]);
    run.arg(scratch.runtime_dir(HOSTS[0]).join("host-memory.sock"));
    let mut vmm = start_vmm(run, boot, &console, scratch)?;
    let waited = interrupt.wait_until("the list of nodes of a guest", NODES_TIMEOUT, || {
        Ok(vmm.exit_status()?.is_some() || !numa_report(&console).kernel.is_empty())
    });
    let report = GuestReport::from_numa_report(&numa_report(&console));
    let failure = |reason: String| {
        Failure::BadResult(format!("{reason}:\n{}\n{}", vmm.log_tail(), last_lines(&console)))
    };
    match waited {
        Err(timed_out @ Failure::TimedOut { .. }) => return Err(failure(timed_out.to_string())),
        other => other?,
    };
    report.to_lines().iter().for_each(|line| print_details(line));
    report.check_nodes().map_err(failure)?;
    let mut stop = new_command(&programs.vmm);
    stop.args(["stop", VMS[0], "--run-dir"]).arg(&run_dir);
    let pressed_at = Instant::now();
    let stopped = stop.status().map_err(Failure::start_error("vmm-plugin"))?;
    interrupt.wait_until("the guest to power off", STOP_TIMEOUT, || Ok(vmm.exit_status()?.is_some()))?;
    let elapsed = pressed_at.elapsed();
    let status = vmm.exit_status()?.filter(|status| !status.success() || !stopped.success());
    if let Some(status) = status {
        let details = format!("{}\n{}", vmm.log_tail(), last_lines(&console));
        return Err(Failure::BadResult(format!("the guest failed: {status}:\n{details}")));
    }
    print_details(&format!(
        "the guest powered off {:.1} s after its power button was pressed",
        elapsed.as_secs_f64()
    ));
    Ok(report)
}

/// Adds the common options of all guests to a command, and starts the command.
fn start_vmm(
    mut run: std::process::Command,
    boot: &BootFiles,
    console: &Path,
    scratch: &ScratchFolders,
) -> Result<Process, Failure> {
    if rustix::process::geteuid().is_root() {
        run.args(UNPRIVILEGED_USER_OPTIONS);
    }
    run.arg("--run-dir").arg(scratch.file("vmm")).arg("--kernel").arg(&boot.kernel);
    run.arg("--initrd").arg(&boot.initrd).args(["--cmdline", "console=ttyS0 quiet panic=-1 pci=off"]);
    run.arg("--serial").arg(format!("file={}", console.display()));
    service::start("vmm-plugin", &mut run, scratch.file("vmm.log"))
}

fn numa_report(console: &Path) -> NumaReport {
    NumaReport::parse(&console_output(console))
}

/// Returns the console output so far. Returns an empty string if the file cannot be read.
fn console_output(console: &Path) -> String {
    fs::read(console).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn last_lines(console: &Path) -> String {
    let output = console_output(console);
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
