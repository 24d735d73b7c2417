//! A host of a rack as a QEMU guest, for tests, benchmarks and the demo: every instruction is emulated, so it runs anywhere, and
//! it has a KVM of its own in which Linux guests boot. It has a kernel of Debian's, a file system in memory, and does what one
//! shell script says. Fetching QEMU and kernels is `cargo xtask`'s business; what a script's output means is the caller's.

#![forbid(unsafe_code)]

mod bed;
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
    bed::{Bed, KERNELS, PLACE},
    initrd::{GUEST_MODULES, Initrd},
};

/// How long one host may take on a busy machine, from power on to power off.
pub const PATIENCE: Duration = Duration::from_secs(1500);
/// How often it is asked whether a host that says nothing is still wanted.
const ASKED_EVERY: Duration = Duration::from_millis(200);
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
    #[error("cannot {tried} {}", path.display())]
    File {
        /// What was tried.
        tried: &'static str,
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
    #[error("{program} failed: {said}")]
    Failed {
        /// Which one.
        program: String,
        /// What it said.
        said: String,
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
    Silent {
        /// Which one.
        host: String,
        /// For how long it was waited.
        within: Duration,
    },
    /// A rack cannot be there.
    #[error("folder {}: the names of its sockets would have more than {bytes_max} bytes", folder.display())]
    Folder {
        /// Where it was to be.
        folder: PathBuf,
        /// What Linux takes.
        bytes_max: usize,
    },
    /// The devices of a rack do not fit into memory.
    #[error(
        "{folder} has {free_mib} MiB free, the rack's devices and drives need {wanted_mib} MiB: remove files there, or plan fewer slices"
    )]
    Room {
        /// Where their bytes are kept.
        folder: &'static str,
        /// Bytes of all devices and drives, in MiB.
        wanted_mib: u64,
        /// Free space there, in MiB.
        free_mib: u64,
    },
    /// Whoever waited for it wants it no more.
    #[error("interrupted")]
    Interrupted,
    /// It did not switch itself off.
    #[error("the emulated host did not switch itself off within {PATIENCE:?}; it said:\n{said}")]
    Late {
        /// All that it said.
        said: String,
    },
}

impl HostError {
    fn file(tried: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |errno| Self::File { tried, path, errno }
    }

    fn start(program: &Path) -> impl FnOnce(io::Error) -> Self {
        let program = program.display().to_string();
        move |errno| Self::Start { program, errno }
    }
}

/// A host that is being prepared.
#[derive(Debug)]
pub struct Host<'a> {
    bed: &'a Bed,
    initrd: Initrd,
    memory_mib: u32,
}

impl<'a> Host<'a> {
    /// A host with 4 GiB that does what a script says. Its kernels for guests are `/guest/6.1` and `/guest/6.12`.
    ///
    /// # Errors
    /// Something is not there, or the file system cannot be made.
    pub fn new(bed: &'a Bed, script: &str) -> Result<Self, HostError> {
        let initrd = Initrd::new(bed, HOST_KERNEL, HOST_MODULES, script)?;
        for name in KERNELS {
            initrd.copy(&bed.kernel(name), &format!("guest/{name}"))?;
        }
        Ok(Self { bed, initrd, memory_mib: 4096 })
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
        self.initrd.folder(&self.bed.qemu_folder(), "qemu")?;
        let start = "#!/bin/sh\nexec /qemu/qemu-system-x86_64 \"$@\"\n";
        self.initrd.write("bin/qemu-system-x86_64", start)
    }

    /// Boots it, lets it do what its script says, hands each line of its console to `see`, and returns them all. `is_wanted` is
    /// asked every now and then.
    ///
    /// # Errors
    /// QEMU does not run, the host does not switch itself off within [`PATIENCE`], or it is not wanted any more.
    pub fn run(self, see: impl FnMut(&str), is_wanted: impl Fn() -> bool) -> Result<String, HostError> {
        let dir = initrd::folder()?;
        let initrd = dir.path().join("initrd");
        self.initrd.pack(&initrd)?;
        let mut qemu = self.start(&initrd)?;
        let said = listen(&mut qemu, see, is_wanted);
        let _ = qemu.kill(); // it is over, or was given up
        let _ = qemu.wait();
        said
    }

    fn start(&self, initrd: &Path) -> Result<Child, HostError> {
        let program = self.bed.qemu();
        // A signal that ends this program ends QEMU, too.
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL"]).arg(&program);
        qemu.args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU])
            .args(["-smp", &CPUS.to_string(), "-m"])
            .arg(format!("{}M", self.memory_mib))
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio", "-kernel"])
            .arg(self.bed.kernel(HOST_KERNEL))
            .arg("-initrd")
            .arg(initrd)
            .args(["-append", "console=ttyS0 quiet panic=-1"]);
        qemu.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(HostError::start(&program))
    }
}

/// Reads a host's console to its end, which comes when the host switches itself off.
fn listen(
    qemu: &mut Child,
    mut see: impl FnMut(&str),
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
    let give_up = Instant::now() + PATIENCE;
    let mut said = String::new();
    loop {
        match lines.recv_timeout(ASKED_EVERY) {
            Ok(line) => {
                let line = String::from_utf8_lossy(&line).replace('\r', "");
                see(&line);
                said += &line;
                said.push('\n');
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(said),
            Err(RecvTimeoutError::Timeout) if !is_wanted() => return Err(HostError::Interrupted),
            Err(RecvTimeoutError::Timeout) if Instant::now() > give_up => {
                return Err(HostError::Late { said });
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
