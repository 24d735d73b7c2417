//! What Linux guests need: Debian's kernels, unpacked into `target/guests` once, and QEMU as a host for them. Nothing of it
//! is installed on this machine but the programs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    debian::{self, Needed},
    demo::BIN_DIR,
    failure::Failure,
    repository::{cargo, root},
    step::step,
};

/// The oldest QEMU whose emulated processor runs guests inside without mishap; 7.2 does not.
const QEMU_MAJOR_MIN: u32 = 10;
/// The suite that has it.
const QEMU_SUITE: &str = "bookworm-backports";
/// Other programs that guests and hosts are made with.
const PROGRAMS: &[Needed] = &[
    Needed { program: "busybox", package: "busybox-static" },
    Needed { program: "cpio", package: "cpio" },
    Needed { program: "iasl", package: "acpica-tools" },
    Needed { program: "xz", package: "xz-utils" },
    Needed { program: "dpkg-deb", package: "dpkg" },
];

/// The kernels that guests boot: what they are called here, and the Debian suite they come from.
const KERNELS: &[(&str, &str)] = &[("6.1", "bookworm"), ("6.12", "bookworm-backports")];
/// The package that always depends on a suite's newest kernel for clouds.
const NEWEST: &str = "linux-image-cloud-amd64";
/// The modules that guests and their hosts load; which of them a kernel has built in differs.
const MODULES: &[&str] =
    &["irqbypass", "kvm", "kvm-amd", "virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio-rng"];

/// Read by the program that boots guests: where kernels are, and where our programs are.
const GUESTS: &str = "TARN_GUESTS";

/// Boots Linux guests and looks at what they tell.
///
/// # Errors
/// Something is missing and cannot be had from here, or a guest is not as it should be.
pub fn run() -> Result<(), Failure> {
    let place = ensure()?;
    step("build programs", &mut cargo(&["build", "--workspace", "--bins"]))?;
    let programs = std::env::current_exe().map_err(Failure::start("xtask"))?;
    let programs = programs.parent().unwrap_or(Path::new("/")).to_owned(); // they were built beside this one
    let mut guests = Command::new(programs.join("linux-guests"));
    step("Linux guests", guests.env(GUESTS, place).env(BIN_DIR, programs))
}

/// Sees to it that programs and kernels are there, and says where the kernels are.
fn ensure() -> Result<PathBuf, Failure> {
    PROGRAMS.iter().try_for_each(|needed| debian::ensure(*needed))?;
    let place = root().join("target/guests");
    ensure_qemu(&place.join("apt"))?;
    let missing: Vec<_> =
        KERNELS.iter().filter(|(name, _)| !place.join(name).join("vmlinuz").exists()).collect();
    if !missing.is_empty() {
        let apt = Apt::prepare(&place.join("apt"))?;
        missing.into_iter().try_for_each(|(name, suite)| fetch(&apt, suite, &place.join(name)))?;
    }
    Ok(place)
}

/// QEMU as the machine has it if it is new enough, else the one of the suite that has it.
fn ensure_qemu(apt: &Path) -> Result<(), Failure> {
    let version = said(Command::new("qemu-system-x86_64").arg("--version"));
    let major = version.ok().and_then(|said| {
        let number = said.split_whitespace().skip_while(|word| *word != "version").nth(1)?;
        number.split('.').next()?.parse::<u32>().ok()
    });
    if major.is_some_and(|major| major >= QEMU_MAJOR_MIN) {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::Result(format!(
            "QEMU {QEMU_MAJOR_MIN} or newer is needed: apt-get install -t {QEMU_SUITE} qemu-system-x86"
        )));
    }
    let apt = Apt::prepare(apt)?;
    let place = apt.dir.display();
    let mut install = Command::new("apt-get");
    install.env("DEBIAN_FRONTEND", "noninteractive").args([
        "--quiet",
        "install",
        "--yes",
        "--no-install-recommends",
    ]);
    // Our own sources, and this machine's record of what is installed.
    for setting in [
        format!("Dir::Etc::sourcelist={place}/sources.list"),
        "Dir::Etc::sourceparts=-".into(),
        format!("Dir::State::lists={place}/lists"),
    ] {
        install.arg("-o").arg(setting);
    }
    step("install qemu-system-x86", install.args(["--target-release", QEMU_SUITE, "qemu-system-x86"]))
}

/// A package manager's state of our own: this machine's is left alone.
struct Apt {
    dir: PathBuf,
}

impl Apt {
    fn prepare(dir: &Path) -> Result<Self, Failure> {
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.join(folder)).map_err(Failure::file("make", dir))?;
        }
        let mirror = mirror()?;
        let source = |suite: &str| {
            let key = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg";
            format!("deb [{key}] {mirror} {suite} main\n")
        };
        let place = dir.display();
        let settings = format!(
            "Dir::Etc::sourcelist \"{place}/sources.list\";\nDir::Etc::sourceparts \"-\";\n\
             Dir::State::lists \"{place}/lists\";\nDir::State::status \"{place}/status\";\n\
             Dir::Cache \"{place}/cache\";\nAPT::Sandbox::User \"root\";\n"
        );
        let sources: String = KERNELS.iter().map(|(_, suite)| source(suite)).collect();
        for (name, content) in [("sources.list", sources), ("status", String::new()), ("apt.conf", settings)]
        {
            fs::write(dir.join(name), content).map_err(Failure::file("write", dir.join(name)))?;
        }
        let apt = Self { dir: dir.to_owned() };
        step("package lists of Debian's kernels", apt.command("apt-get").args(["--quiet", "update"]))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.dir.join("apt.conf"));
        command
    }

    fn newest_kernel(&self, suite: &str) -> Result<String, Failure> {
        let mut ask = self.command("apt-cache");
        let said = said(ask.args(["--target-release", suite, "depends", NEWEST]))?;
        let package = said.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
        package.map(str::to_owned).ok_or_else(|| Failure::Answer {
            program: "apt-cache".to_owned(),
            why: format!("{NEWEST} of {suite} depends on nothing: {said:?}"),
        })
    }
}

/// Where this machine gets Debian's packages from.
fn mirror() -> Result<String, Failure> {
    let mut ask = Command::new("apt-get");
    let said =
        said(ask.args(["indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"]))?;
    let of_debian = said.lines().find_map(|line| line.strip_prefix("bookworm "));
    of_debian.map(str::to_owned).ok_or_else(|| Failure::Answer {
        program: "apt-get".to_owned(),
        why: format!("no package source of Debian 12 (bookworm): {said:?}"),
    })
}

/// Fetches a suite's kernel and keeps what is needed of it. The kernel itself comes last: with it all is there.
fn fetch(apt: &Apt, suite: &str, place: &Path) -> Result<(), Failure> {
    let package = apt.newest_kernel(suite)?;
    let here = apt.dir.join(suite);
    fs::create_dir_all(&here).map_err(Failure::file("make", &here))?;
    let mut download = apt.command("apt-get");
    step(&format!("fetch {package}"), download.args(["--quiet", "download", &package]).current_dir(&here))?;
    let archive = find(&here, |name| name.starts_with(&package) && name.ends_with(".deb"))?;
    let unpacked = here.join("unpacked");
    step(&format!("unpack {package}"), Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&unpacked))?;
    fs::create_dir_all(place.join("modules")).map_err(Failure::file("make", place))?;
    for module in MODULES {
        keep_module(&unpacked, module, &place.join("modules"))?;
    }
    let kernel = find(&unpacked, |name| name.starts_with("vmlinuz-"))?;
    fs::copy(&kernel, place.join("vmlinuz")).map_err(Failure::file("copy", &kernel))?;
    fs::remove_dir_all(&here).map_err(Failure::file("remove", &here))
}

/// A module that the kernel has built in is not there, and not missed.
fn keep_module(unpacked: &Path, module: &str, modules: &Path) -> Result<(), Failure> {
    let names = [format!("{module}.ko"), format!("{module}.ko.xz")];
    let Ok(found) = find(unpacked, |name| names.iter().any(|known| known == name)) else { return Ok(()) };
    let kept = modules.join(found.file_name().unwrap_or_default());
    fs::copy(&found, &kept).map_err(Failure::file("copy", &found))?;
    if kept.extension().is_some_and(|extension| extension == "xz") {
        step(&format!("unpack {module}"), Command::new("xz").args(["--decompress", "--force"]).arg(&kept))?;
    }
    Ok(())
}

/// The first file below a folder whose name is right.
fn find(folder: &Path, is_right: impl Fn(&str) -> bool + Copy) -> Result<PathBuf, Failure> {
    let entries = fs::read_dir(folder).map_err(Failure::file("read", folder))?;
    for entry in entries.filter_map(Result::ok) {
        let path = entry.path();
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_folder {
            if let Ok(found) = find(&path, is_right) {
                return Ok(found);
            }
        } else if entry.file_name().to_str().is_some_and(is_right) {
            return Ok(path);
        }
    }
    let why = std::io::Error::from(std::io::ErrorKind::NotFound);
    Err(Failure::file("find what is needed in", folder)(why))
}

fn said(command: &mut Command) -> Result<String, Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(Failure::start(&program))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(Failure::Answer { program, why: String::from_utf8_lossy(&output.stderr).into_owned() }),
    }
}
