//! A host of a rack as a QEMU guest, for tests, benchmarks and the demo: every instruction is emulated, so it runs anywhere, and
//! it has a KVM of its own in which Linux guests boot. It has a kernel of Debian's, a file system in memory, and does what one
//! shell script says. Fetching QEMU and kernels is `cargo xtask`'s business; what a script's output means is the caller's.

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

/// How long one host may take on a busy machine, from power on to power off.
pub const HOST_RUN_TIMEOUT: Duration = Duration::from_secs(1500);
/// How often it is asked whether a host that says nothing is still wanted.
const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// An emulated processor with AMD's virtualisation. The newest features of `max` are not safe with guests inside: with
/// protection keys and five levels of page tables, guests see exceptions that nobody raised. What is off is what QEMU does not
/// emulate, and would warn of.
const CPU: &str = "EPYC,fxsr-opt=off,misalignsse=off,osvw=off,topoext=off,nrip-save=off,xsavec=off";
/// One processor: with two, QEMU emulates them at the same time, and now and then a guest crashes or hangs for it.
const CPUS: u32 = 1;
/// The kernel that hosts have.
const HOST_KERNEL: &str = "6.1";
/// The modules that a host loads, in order; a kernel may have some of them built in.
pub const HOST_MODULES: &[&str] = &["irqbypass", "kvm", "kvm-amd", "tun"];
/// The modules that a host of a rack loads beside those of a guest, in order: KVM, and CXL memory as far as device-dax. `kmem` is
/// the agent's to load: as soon as it is there it takes every range that nobody has divided.
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

/// Why there is no host, or no answer of it.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Something is not there.
    #[error("{} is missing: `cargo xtask test`, `demo` and `rack` fetch it", .0.display())]
    Missing(PathBuf),
    /// A file or folder cannot be used.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// A program does not start.
    #[error("cannot run {program}")]
    Start {
        /// Which one.
        program: String,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// A program failed.
    #[error("{program} failed: {output}")]
    Failed {
        /// Which one.
        program: String,
        /// Its output.
        output: String,
    },
    /// A host of a rack cannot be switched, or is not what it should be after it was.
    #[error("host {host}: {why}")]
    Power {
        /// Which one.
        host: String,
        /// What is wrong.
        why: String,
    },
    /// A host of a rack did not answer: it is paused, off, or busy.
    #[error("host {host} did not answer within {within:?}")]
    NoReply {
        /// Which one.
        host: String,
        /// For how long it was waited.
        within: Duration,
    },
    /// A rack cannot be there.
    #[error("folder {}: the names of its sockets would have more than {bytes_max} bytes", folder.display())]
    SocketPathTooLong {
        /// Where it was to be.
        folder: PathBuf,
        /// What Linux takes.
        bytes_max: usize,
    },
    /// The devices of a rack do not fit into memory.
    #[error(
        "{folder} has {free_mib} MiB free, the rack's devices and drives need {needed_mib} MiB: remove files there, or plan fewer slices"
    )]
    OutOfSpace {
        /// Where their bytes are kept.
        folder: &'static str,
        /// Bytes of all devices and drives, in MiB.
        needed_mib: u64,
        /// Free space there, in MiB.
        free_mib: u64,
    },
    /// Whoever waited for it wants it no more.
    #[error("interrupted")]
    Interrupted,
    /// It did not switch itself off.
    #[error(
        "the emulated host did not power off within {HOST_RUN_TIMEOUT:?}; its console:\n{console_text}"
    )]
    StillRunning {
        /// All that it said.
        console_text: String,
    },
}

impl HostError {
    fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |errno| Self::File { action, path, errno }
    }

    fn start(program: &Path) -> impl FnOnce(io::Error) -> Self {
        let program = program.display().to_string();
        move |errno| Self::Start { program, errno }
    }
}

/// A host that is being prepared.
#[derive(Debug)]
pub struct Host<'a> {
    artifacts: &'a Artifacts,
    initrd: Initrd,
    memory_mib: u32,
}

impl<'a> Host<'a> {
    /// A host with 4 GiB that does what a script says. Its kernels for guests are `/guest/6.1` and `/guest/6.12`.
    ///
    /// # Errors
    /// Something is not there, or the file system cannot be made.
    pub fn new(artifacts: &'a Artifacts, script: &str) -> Result<Self, HostError> {
        let initrd = Initrd::new(artifacts, HOST_KERNEL, HOST_MODULES, script)?;
        for name in KERNELS {
            initrd.copy(&artifacts.kernel(name), &format!("guest/{name}"))?;
        }
        Ok(Self { artifacts, initrd, memory_mib: 4096 })
    }

    /// How much memory it has, in MiB.
    #[must_use]
    pub fn with_memory_mib(self, memory_mib: u32) -> Self {
        Self { memory_mib, ..self }
    }

    /// Adds one of our programs as `/bin/NAME`, without what only a debugger reads.
    ///
    /// # Errors
    /// There is no such program.
    pub fn program(&self, program: &Path) -> Result<(), HostError> {
        self.program_as(program, &program.file_name().unwrap_or_default().to_string_lossy())
    }

    /// Adds one of our programs as `/bin/` and this name.
    ///
    /// # Errors
    /// There is no such program.
    pub fn program_as(&self, program: &Path, name: &str) -> Result<(), HostError> {
        self.initrd.program(program, &format!("bin/{name}"))
    }

    /// Adds a file of this content.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn file(&self, name: &str, content: &str) -> Result<(), HostError> {
        self.initrd.write(name, content)
    }

    /// Adds a file.
    ///
    /// # Errors
    /// It cannot be copied.
    pub fn copy(&self, from: &Path, name: &str) -> Result<(), HostError> {
        self.initrd.copy(from, name)
    }

    /// Adds a guest's file system as `/guest/NAME`.
    ///
    /// # Errors
    /// It cannot be packed.
    pub fn guest(&self, name: &str, initrd: &Initrd) -> Result<(), HostError> {
        initrd.pack(&self.initrd.place(&format!("guest/{name}"))?)
    }

    /// Adds QEMU as `/bin/qemu-system-x86_64`, for guests that it runs on the host's KVM.
    ///
    /// # Errors
    /// It cannot be copied.
    pub fn qemu(&self) -> Result<(), HostError> {
        self.initrd.folder(&self.artifacts.qemu_folder(), "qemu")?;
        let start = "#!/bin/sh\nexec /qemu/qemu-system-x86_64 \"$@\"\n";
        self.initrd.write("bin/qemu-system-x86_64", start)
    }

    /// Boots it, lets it do what its script says, hands each line of its console to `see`, and returns them all. `is_wanted` is
    /// asked every now and then.
    ///
    /// # Errors
    /// QEMU does not run, the host does not switch itself off within [`HOST_RUN_TIMEOUT`], or it is not wanted any more.
    pub fn run(self, on_line: impl FnMut(&str), is_wanted: impl Fn() -> bool) -> Result<String, HostError> {
        let dir = initrd::folder()?;
        let initrd = dir.path().join("initrd");
        self.initrd.pack(&initrd)?;
        let mut qemu = self.start(&initrd)?;
        let console_text = read_console(&mut qemu, on_line, is_wanted);
        let _ = qemu.kill(); // it is over, or was given up
        let _ = qemu.wait();
        console_text
    }

    fn start(&self, initrd: &Path) -> Result<Child, HostError> {
        let program = self.artifacts.qemu();
        // A signal that ends this program ends QEMU, too.
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL"]).arg(&program);
        qemu.args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU])
            .args(["-smp", &CPUS.to_string(), "-m"])
            .arg(format!("{}M", self.memory_mib))
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio", "-kernel"])
            .arg(self.artifacts.kernel(HOST_KERNEL))
            .arg("-initrd")
            .arg(initrd)
            .args(["-append", "console=ttyS0 quiet panic=-1"]);
        qemu.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(HostError::start(&program))
    }
}

/// Reads a host's console to its end, which comes when the host switches itself off.
fn read_console(
    qemu: &mut Child,
    mut on_line: impl FnMut(&str),
    is_wanted: impl Fn() -> bool,
) -> Result<String, HostError> {
    let console = qemu.stdout.take().expect("a pipe was asked for");
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        // What was said until it broke is still worth reading.
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
            Err(RecvTimeoutError::Timeout) if !is_wanted() => return Err(HostError::Interrupted),
            Err(RecvTimeoutError::Timeout) if Instant::now() > deadline => {
                return Err(HostError::StillRunning { console_text });
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
