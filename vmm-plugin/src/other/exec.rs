//! Becomes another VMM. The agent registers this very process as the VM's, and a process that becomes another program stays
//! the same process: its number, its start and whoever watches it. So what it had goes back when the other VMM ends, and
//! nobody has to stay behind to see to that.

use std::{
    env,
    fs::File,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use proto::v1::MemoryForm;
use rustix::fs::Access;

use super::{
    OtherError, cloud_hypervisor,
    guest::{Guest, numbers},
    qemu,
};
use crate::{
    config::{Config, Written},
    source,
};

/// Another VMM to become, as written.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Which VMM
    #[arg(long)]
    pub vmm: Program,
    /// Where it is, if not in PATH under its usual name
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    #[command(flatten)]
    guest: Written,
}

/// VMMs that are one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Program {
    /// QEMU.
    Qemu,
    /// Cloud Hypervisor.
    CloudHypervisor,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Qemu => qemu::PROGRAM,
            Self::CloudHypervisor => cloud_hypervisor::PROGRAM,
        }
    }

    fn options(self, guest: &Guest) -> Result<Vec<Vec<String>>, OtherError> {
        match self {
            Self::Qemu => qemu::options(guest),
            Self::CloudHypervisor => cloud_hypervisor::options(guest),
        }
    }
}

/// Becomes the other VMM. What can be wrong is found before this process is registered; if it still fails afterwards, its end
/// gives everything back.
///
/// # Errors
/// [`OtherError`]; it does not return otherwise.
pub fn exec(args: Args) -> Result<std::convert::Infallible, OtherError> {
    let program = match args.program {
        Some(path) => path,
        None => in_path(args.vmm.name()),
    };
    check_program(&program)?;
    let config = args.guest.check()?;
    check_files(&config)?;
    let guest = Guest::seen(config)?;
    let options = args.vmm.options(&guest)?;
    register(&guest)?;
    let errno = Command::new(&program).args(options.concat()).exec();
    Err(OtherError::Needed { what: "program", path: program, errno })
}

/// As this process's memory it would come as descriptors, which close when it becomes another program: that one opens the
/// paths.
fn register(guest: &Guest) -> Result<(), OtherError> {
    let Some(socket) = &guest.config.agent else { return Ok(()) };
    let memory = source::asked(&guest.config, socket, |agent, vm| agent.attach(vm, MemoryForm::Descriptors))?;
    if numbers(&memory) == guest.slices {
        Ok(())
    } else {
        Err(OtherError::Changed(guest.config.vm.to_string()))
    }
}

/// The first of this name in PATH, or the bare name, which then is found missing.
fn in_path(name: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut found = env::split_paths(&path).map(|dir| dir.join(name)).filter(|place| place.is_file());
    found.next().unwrap_or_else(|| name.into())
}

fn check_program(program: &Path) -> Result<(), OtherError> {
    rustix::fs::access(program, Access::EXEC_OK).map_err(|errno| OtherError::Needed {
        what: "program",
        path: program.to_owned(),
        errno: errno.into(),
    })
}

fn check_files(config: &Config) -> Result<(), OtherError> {
    let kernel = [("kernel", &config.kernel.kernel)].into_iter();
    let initrd = config.kernel.initrd.iter().map(|path| ("initrd", path));
    let disks = config.disks.iter().map(|disk| ("disk", &disk.path));
    kernel.chain(initrd).chain(disks).try_for_each(|(what, path)| match File::open(path) {
        Ok(_) => Ok(()),
        Err(errno) => Err(OtherError::Needed { what, path: path.clone(), errno }),
    })
}
