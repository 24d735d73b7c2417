//! Emulated hosts of a rack as QEMU guests, for tests, benchmarks and the demo.
//!
//! QEMU emulates every instruction, so a host runs on any x86-64 machine, even without KVM. The
//! host itself has nested KVM, so Linux guests can boot in the host. A host has a Debian kernel and
//! an initrd, and runs one shell script. `cargo xtask` downloads QEMU and the kernels. Callers
//! interpret the output of the script.

#![forbid(unsafe_code)]

mod artifacts;
mod initrd;
pub mod nodes;
pub mod rack;

use std::{
    io::{self, BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

pub use self::{
    artifacts::{ARTIFACTS_ENV, Artifacts, KERNELS},
    initrd::{GUEST_MODULES, Initrd},
};

/// Maximum time from power-on to power-off of a host. The value is large because emulation is slow
/// on a busy machine.
pub const HOST_RUN_TIMEOUT: Duration = Duration::from_secs(1500);
/// Interval at which a run checks for cancellation while the host prints nothing.
const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// CPU model of hosts, with AMD virtualization. The model `max` does not work with nested guests:
/// with protection keys and 5-level paging, guests receive spurious exceptions. QEMU warns about
/// the disabled features, because it does not emulate them.
const CPU_MODEL: &str = "EPYC,fxsr-opt=off,misalignsse=off,osvw=off,topoext=off,nrip-save=off,xsavec=off";
/// Number of CPUs of a host. The number is 1, because QEMU emulates several CPUs in parallel, and
/// nested guests then crash or hang occasionally.
const CPU_COUNT: u32 = 1;
/// Kernel version of hosts that run a single script.
const HOST_KERNEL: &str = "6.1";
/// Kernel modules of a host, in load order. Modules that are built into the kernel are skipped.
pub const HOST_MODULES: &[&str] = &["irqbypass", "kvm", "kvm-amd", "tun"];
/// Kernel modules of a host in a rack, in load order, in addition to [`GUEST_MODULES`]: KVM, and
/// the drivers from CXL memory to device-dax. The agent loads `kmem` itself, because `kmem` claims
/// every undivided dax range when it is loaded.
pub const RACK_MODULES: &[&str] = &[
    "irqbypass",
    "kvm",
    "ccp",
    "kvm-amd",
    "tun",
    "cxl_port",
    "cxl_acpi",
    "cxl_pci",
    "cxl_mem",
    "device_dax",
    "dax_cxl",
    "kmem",
];

/// Error of an emulated host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A downloaded file is missing.
    #[error("{} is missing: run `cargo xtask test`, which downloads it", .0.display())]
    Missing(PathBuf),
    /// A system call on a file or directory failed.
    #[error("cannot {action} {}", path.display())]
    File {
        /// Description of the failed operation, such as "create".
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error returned by the operating system.
        #[source]
        errno: io::Error,
    },
    /// A program cannot be started.
    #[error("cannot run {program}")]
    Start {
        /// Name of the program.
        program: String,
        /// Error returned by the operating system.
        #[source]
        errno: io::Error,
    },
    /// A program ended with an error.
    #[error("{program} failed: {output}")]
    Failed {
        /// Name of the program.
        program: String,
        /// Standard error or log of the program.
        output: String,
    },
    /// A host's power cannot be switched, or the host is not up afterwards.
    #[error("host {host}: {reason}")]
    Power {
        /// Name of the host.
        host: String,
        /// Description of the failure.
        reason: String,
    },
    /// A host did not reply, because it is paused, off or busy.
    #[error("host {host} did not reply within {within:?}")]
    NoReply {
        /// Name of the host.
        host: String,
        /// Maximum time for the reply.
        within: Duration,
    },
    /// The path of the rack's directory is too long for the paths of its sockets.
    #[error(
        "the path of directory {} is too long: its socket paths would exceed {bytes_max} bytes",
        folder.display()
    )]
    SocketPathTooLong {
        /// The directory of the rack.
        folder: PathBuf,
        /// Maximum length of a socket path, in bytes.
        bytes_max: usize,
    },
    /// The devices and drives do not fit into the tmpfs.
    #[error(
        "{folder} has {free_mib} MiB free, but the rack's devices and drives need {needed_mib} MiB: remove files there, or plan fewer slices"
    )]
    OutOfSpace {
        /// Mount point of the tmpfs.
        folder: &'static str,
        /// Total size of all devices and drives, in MiB.
        needed_mib: u64,
        /// Free space in the tmpfs, in MiB.
        free_mib: u64,
    },
    /// The caller cancelled the operation.
    #[error("interrupted")]
    Interrupted,
    /// The host did not power off in time.
    #[error(
        "the emulated host did not power off within {HOST_RUN_TIMEOUT:?}; console output:\n{console_text}"
    )]
    StillRunning {
        /// Complete console output.
        console_text: String,
    },
}

impl HostError {
    fn file_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |errno| Self::File { action, path, errno }
    }

    fn start_error(program: &Path) -> impl FnOnce(io::Error) -> Self {
        let program = program.display().to_string();
        move |errno| Self::Start { program, errno }
    }
}

/// Emulated host that has not been started.
#[derive(Debug)]
pub struct Host<'a> {
    artifacts: &'a Artifacts,
    initrd: Initrd,
    memory_mib: u32,
}

impl<'a> Host<'a> {
    /// Creates a host with 4 GiB of memory that runs a shell script. The host has the guest kernels
    /// `/guest/6.1` and `/guest/6.12`.
    ///
    /// # Errors
    /// [`HostError`] if a file is missing or the initrd cannot be built.
    pub fn new(artifacts: &'a Artifacts, script: &str) -> Result<Self, HostError> {
        let initrd = Initrd::new(artifacts, HOST_KERNEL, HOST_MODULES, script)?;
        for name in KERNELS {
            initrd.add_file_copy(&artifacts.kernel_path(name), &format!("guest/{name}"))?;
        }
        Ok(Self { artifacts, initrd, memory_mib: 4096 })
    }

    /// Sets the memory size, in MiB.
    #[must_use]
    pub fn with_memory_mib(self, memory_mib: u32) -> Self {
        Self { memory_mib, ..self }
    }

    /// Adds a program to `/bin` under its own name, without debug information.
    ///
    /// # Errors
    /// The errors of [`Initrd::add_program`].
    pub fn add_program(&self, program: &Path) -> Result<(), HostError> {
        self.add_program_as(program, &program.file_name().unwrap_or_default().to_string_lossy())
    }

    /// Adds a program to `/bin` under the name `name`, without debug information.
    ///
    /// # Errors
    /// The errors of [`Initrd::add_program`].
    pub fn add_program_as(&self, program: &Path, name: &str) -> Result<(), HostError> {
        self.initrd.add_program(program, &format!("bin/{name}"))
    }

    /// Adds a file with this content, at the path `name` in the host.
    ///
    /// # Errors
    /// The errors of [`Initrd::add_file`].
    pub fn add_file(&self, name: &str, content: &str) -> Result<(), HostError> {
        self.initrd.add_file(name, content)
    }

    /// Adds a copy of a file, at the path `name` in the host.
    ///
    /// # Errors
    /// The errors of [`Initrd::add_file_copy`].
    pub fn add_file_copy(&self, from: &Path, name: &str) -> Result<(), HostError> {
        self.initrd.add_file_copy(from, name)
    }

    /// Adds the initrd of a guest as `/guest/NAME`.
    ///
    /// # Errors
    /// The errors of [`Initrd::pack`].
    pub fn add_guest_initrd(&self, name: &str, initrd: &Initrd) -> Result<(), HostError> {
        initrd.pack(&self.initrd.prepare_path(&format!("guest/{name}"))?)
    }

    /// Adds QEMU as `/bin/qemu-system-x86_64`, to run guests under the host's KVM.
    ///
    /// # Errors
    /// [`HostError`] if QEMU cannot be copied.
    pub fn add_qemu(&self) -> Result<(), HostError> {
        self.initrd.add_qemu(self.artifacts)
    }

    /// Boots the host, runs its script, and returns the console output. Passes each line of the
    /// console to `on_line`. Calls `should_continue` regularly, and cancels the run if
    /// `should_continue` returns `false`.
    ///
    /// # Errors
    /// [`HostError::Start`] if QEMU cannot be started, [`HostError::StillRunning`] if the host does
    /// not power off within [`HOST_RUN_TIMEOUT`], or [`HostError::Interrupted`].
    pub fn run(
        self,
        on_line: impl FnMut(&str),
        should_continue: impl Fn() -> bool,
    ) -> Result<String, HostError> {
        let dir = initrd::create_temp_dir()?;
        let initrd = dir.path().join("initrd");
        self.initrd.pack(&initrd)?;
        let mut qemu = self.start(&initrd)?;
        let console_text = read_console(&mut qemu, on_line, should_continue);
        let _ = qemu.kill(); // fails only if QEMU has ended
        let _ = qemu.wait();
        console_text
    }

    fn start(&self, initrd: &Path) -> Result<Child, HostError> {
        let program = self.artifacts.qemu_path();
        // QEMU must end with this program, even if this program is killed.
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL"]).arg(&program);
        qemu.args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU_MODEL])
            .args(["-smp", &CPU_COUNT.to_string(), "-m"])
            .arg(format!("{}M", self.memory_mib))
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio", "-kernel"])
            .arg(self.artifacts.kernel_path(HOST_KERNEL))
            .arg("-initrd")
            .arg(initrd)
            .args(["-append", "console=ttyS0 quiet panic=-1"]);
        qemu.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(HostError::start_error(&program))
    }
}

/// Reads the console of a host until QEMU closes the console at power-off.
fn read_console(
    qemu: &mut Child,
    mut on_line: impl FnMut(&str),
    should_continue: impl Fn() -> bool,
) -> Result<String, HostError> {
    let console = qemu.stdout.take().expect("stdout is piped");
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        // Lines read before a read error are still sent.
        for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let deadline = Instant::now() + HOST_RUN_TIMEOUT;
    let mut console_text = String::new();
    loop {
        match lines.recv_timeout(CANCEL_CHECK_INTERVAL) {
            Ok(line) => {
                let line = String::from_utf8_lossy(&line).replace('\r', "");
                on_line(&line);
                console_text += &line;
                console_text.push('\n');
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(console_text),
            Err(RecvTimeoutError::Timeout) if !should_continue() => return Err(HostError::Interrupted),
            Err(RecvTimeoutError::Timeout) if Instant::now() > deadline => {
                return Err(HostError::StillRunning { console_text });
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
