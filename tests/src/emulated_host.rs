//! A host of a rack as a QEMU guest: every instruction is emulated, so it runs anywhere, and it has a KVM of its own in which
//! Linux guests boot. It has a kernel of Debian's, a file system in memory, and does what one shell script says.

use std::{
    fs,
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::rack::programs;

/// How long one host may take on a busy machine, from power on to power off.
const PATIENCE: Duration = Duration::from_secs(400);
/// An emulated processor with AMD's virtualisation. The newest features of `max` are not safe with guests inside: with
/// protection keys and five levels of page tables, guests see exceptions that nobody raised.
const CPU: &str = "EPYC";
/// The kernel that hosts have.
const HOST_KERNEL: &str = "6.1";
/// The kernels that guests can have.
pub const KERNELS: [&str; 2] = ["6.1", "6.12"];

/// The modules that a host loads, in order.
const HOST_MODULES: &[&str] = &["irqbypass", "kvm", "kvm-amd"];
/// The modules that a guest loads, in order.
const GUEST_MODULES: &[&str] = &["virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio-rng"];

/// Where kernels are: what `TARN_GUESTS` names, or where `cargo xtask guests` puts them.
fn kernels() -> PathBuf {
    let place = std::env::var_os("TARN_GUESTS").map(PathBuf::from);
    let place = place.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/guests"));
    assert!(
        place.join(HOST_KERNEL).join("vmlinuz").exists(),
        "no kernels for guests: `cargo xtask guests` fetches them"
    );
    place
}

/// A kernel that guests can have.
pub fn kernel(name: &str) -> PathBuf {
    kernels().join(name).join("vmlinuz")
}

/// A file system in memory, under way.
#[derive(Debug)]
pub struct Initrd {
    dir: tempfile::TempDir,
}

impl Initrd {
    /// Busybox, modules of a kernel, and what is done first.
    fn new(kernel: &str, modules: &[&str], script: &str) -> Self {
        let initrd = Self { dir: tempfile::tempdir().expect("a temporary folder") };
        let busybox = find_program("busybox");
        initrd.program(&busybox, "bin/busybox");
        let mut load = String::new();
        for module in modules {
            let file = kernels().join(kernel).join("modules").join(format!("{module}.ko"));
            if file.exists() {
                initrd.copy(&file, &format!("modules/{module}.ko"));
                load += &format!("insmod /modules/{module}.ko || echo \"module {module} is missing\"\n");
            }
        }
        let init = format!(
            "#!/bin/busybox sh\n/bin/busybox --install -s /bin\nexport PATH=/bin\nmkdir -p /proc /sys /dev /tmp\n\
             mount -t proc proc /proc\nmount -t sysfs sys /sys\nmount -t devtmpfs dev /dev\nmount -t tmpfs tmp /tmp\n\
             {load}{script}\npoweroff -f\n"
        );
        initrd.write("init", &init);
        initrd
    }

    /// Of a guest that does what a script says, and switches itself off.
    pub fn of_guest(kernel: &str, script: &str) -> Self {
        Self::new(kernel, GUEST_MODULES, script)
    }

    fn place(&self, name: &str) -> PathBuf {
        let place = self.dir.path().join(name);
        fs::create_dir_all(place.parent().expect("a folder")).expect("a temporary folder takes folders");
        place
    }

    /// Adds a program or a text.
    pub fn write(&self, name: &str, content: &str) {
        let place = self.place(name);
        fs::write(&place, content).expect("a temporary folder takes files");
        fs::set_permissions(place, fs::Permissions::from_mode(0o755)).expect("it is ours");
    }

    /// Adds a file.
    pub fn copy(&self, from: &Path, name: &str) {
        fs::copy(from, self.place(name)).unwrap_or_else(|error| panic!("copy {}: {error}", from.display()));
    }

    /// Adds a program, and the libraries it wants.
    pub fn program(&self, from: &Path, name: &str) {
        self.copy(from, name);
        let listed = Command::new("ldd").arg(from).output().expect("ldd runs");
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        for library in
            listed.split_whitespace().filter(|word| word.starts_with("/lib") || word.starts_with("/usr/lib"))
        {
            self.copy(Path::new(library), &library[1..]);
        }
    }

    /// Packs it.
    pub fn pack(&self, into: &Path) {
        let pack = "find . | cpio --create --format=newc --quiet";
        let file = fs::File::create(into).expect("a temporary folder takes files");
        let packed = Command::new("sh").args(["-c", pack]).current_dir(self.dir.path()).stdout(file).status();
        assert!(packed.expect("a shell runs").success(), "cpio failed");
    }
}

fn find_program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("{name} is needed: `cargo xtask guests` installs it"))
}

/// A host that is being prepared.
#[derive(Debug)]
pub struct Host {
    initrd: Initrd,
    memory_mib: u32,
}

impl Host {
    /// With KVM, and `vmm-plugin`, that does what a script says. `/guest/KERNEL` is each kernel that guests can have.
    pub fn new(script: &str) -> Self {
        let initrd = Initrd::new(HOST_KERNEL, HOST_MODULES, script);
        for name in KERNELS {
            initrd.copy(&kernel(name), &format!("guest/{name}"));
        }
        let host = Self { initrd, memory_mib: 4096 };
        host.program("vmm-plugin");
        host
    }

    /// Adds one of our programs.
    pub fn program(&self, name: &str) {
        self.initrd.program(&programs().join(name), &format!("bin/{name}"));
    }

    /// Adds a guest's file system as `/guest/NAME`.
    pub fn guest(&self, name: &str, initrd: &Initrd) {
        let packed = self.initrd.place(&format!("guest/{name}"));
        initrd.pack(&packed);
    }

    /// Boots the host, lets it do what its script says, and hands out what its console said.
    pub fn run(self) -> String {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let initrd = dir.path().join("initrd");
        self.initrd.pack(&initrd);
        let mut qemu = Command::new("qemu-system-x86_64")
            .args(["-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", "2", "-m"])
            .arg(format!("{}M", self.memory_mib))
            .args(["-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio", "-kernel"])
            .arg(kernel(HOST_KERNEL))
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", "console=ttyS0 quiet panic=-1"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-system-x86_64 runs");
        let mut console = qemu.stdout.take().expect("a pipe was asked for");
        let reader = std::thread::spawn(move || {
            let mut said = Vec::new();
            let _ = console.read_to_end(&mut said); // what was said until it broke is still worth reading
            String::from_utf8_lossy(&said).replace('\r', "")
        });
        let give_up = Instant::now() + PATIENCE;
        while qemu.try_wait().expect("our child").is_none() {
            if Instant::now() > give_up {
                let _ = qemu.kill(); // it may just have ended
                let said = reader.join().expect("the reader does not panic");
                panic!("the host did not switch itself off within {PATIENCE:?}; it said:\n{said}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        reader.join().expect("the reader does not panic")
    }
}
