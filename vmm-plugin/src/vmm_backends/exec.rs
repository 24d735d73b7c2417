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
    BackendError, cloud_hypervisor,
    guest::{Guest, slice_epochs},
    qemu,
};
use crate::{
    config::{Config, GuestArgs},
    source,
};

/// Another VMM to become, as written.
#[derive(Clone, Debug, clap::Args)]
pub struct ExecArgs {
    /// Which VMM
    #[arg(long)]
    pub vmm: ExecVmm,
    /// Where it is, if not in PATH under its usual name
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    #[command(flatten)]
    guest: GuestArgs,
}

/// VMMs that are one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ExecVmm {
    /// QEMU.
    Qemu,
    /// Cloud Hypervisor.
    CloudHypervisor,
}

impl ExecVmm {
    fn name(self) -> &'static str {
        match self {
            Self::Qemu => qemu::PROGRAM,
            Self::CloudHypervisor => cloud_hypervisor::PROGRAM,
        }
    }

    fn options(self, guest: &Guest) -> Result<Vec<Vec<String>>, BackendError> {
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
/// [`BackendError`]; it does not return otherwise.
pub fn exec(args: ExecArgs) -> Result<std::convert::Infallible, BackendError> {
    let program = match args.program {
        Some(path) => path,
        None => in_path(args.vmm.name()),
    };
    check_program(&program)?;
    let config = args.guest.check()?;
    check_files(&config)?;
    let guest = Guest::inspect(config)?;
    let options = args.vmm.options(&guest)?;
    register(&guest)?;
    let errno = Command::new(&program).args(options.concat()).exec();
    Err(BackendError::Unusable { role: "program", path: program, errno })
}

/// As this process's memory it would come as descriptors, which close when it becomes another program: that one opens the
/// paths.
fn register(guest: &Guest) -> Result<(), BackendError> {
    let Some(socket) = &guest.config.agent else { return Ok(()) };
    let memory =
        source::with_agent(&guest.config, socket, |agent, vm| agent.attach(vm, MemoryForm::Descriptors))?;
    if slice_epochs(&memory) == guest.slices {
        Ok(())
    } else {
        Err(BackendError::ReservationChanged(guest.config.vm.to_string()))
    }
}

/// The first of this name in PATH, or the bare name, which then is found missing.
fn in_path(name: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut found = env::split_paths(&path).map(|dir| dir.join(name)).filter(|path| path.is_file());
    found.next().unwrap_or_else(|| name.into())
}

fn check_program(program: &Path) -> Result<(), BackendError> {
    rustix::fs::access(program, Access::EXEC_OK).map_err(|errno| BackendError::Unusable {
        role: "program",
        path: program.to_owned(),
        errno: errno.into(),
    })
}

fn check_files(config: &Config) -> Result<(), BackendError> {
    let kernel = [("kernel", &config.kernel.kernel)].into_iter();
    let initrd = config.kernel.initrd.iter().map(|path| ("initrd", path));
    let disks = config.disks.iter().map(|disk| ("disk", &disk.path));
    kernel.chain(initrd).chain(disks).try_for_each(|(role, path)| match File::open(path) {
        Ok(_) => Ok(()),
        Err(errno) => Err(BackendError::Unusable { role, path: path.clone(), errno }),
    })
}
