//! Replaces this process by another VMM. The agent registers this process as the process of the VM.
//! exec(2) keeps the process ID and the start time, so the registration also covers the other VMM.
//! The agent releases the memory when the other VMM ends.

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

/// Options of the command `exec`.
#[derive(Clone, Debug, clap::Args)]
pub struct ExecArgs {
    /// VMM to run
    #[arg(long)]
    pub vmm: ExecVmm,
    /// Executable of the VMM [default: found in PATH]
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    #[command(flatten)]
    guest: GuestArgs,
}

/// VMM that can replace this process. libvirt cannot, because its daemon starts QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ExecVmm {
    /// QEMU, started directly.
    Qemu,
    /// Cloud Hypervisor.
    CloudHypervisor,
}

impl ExecVmm {
    fn name(self) -> &'static str {
        match self {
            Self::Qemu => qemu::VMM_PROGRAM,
            Self::CloudHypervisor => cloud_hypervisor::VMM_PROGRAM,
        }
    }

    fn options(self, guest: &Guest) -> Result<Vec<Vec<String>>, BackendError> {
        match self {
            Self::Qemu => qemu::options(guest),
            Self::CloudHypervisor => cloud_hypervisor::options(guest),
        }
    }
}

/// Replaces this process by the other VMM. All checks are made before the agent registers this
/// process. If exec(2) fails, the agent releases the memory when this process ends.
///
/// # Errors
/// [`BackendError`] if a check or exec(2) fails. The function does not return on success.
pub fn exec(args: ExecArgs) -> Result<std::convert::Infallible, BackendError> {
    let program = match args.program {
        Some(path) => path,
        None => find_in_path(args.vmm.name()),
    };
    check_program(&program)?;
    let config = args.guest.check()?;
    check_files(&config)?;
    let guest = Guest::inspect(config)?;
    let options = args.vmm.options(&guest)?;
    attach_to_agent(&guest)?;
    let errno = Command::new(&program).args(options.concat()).exec();
    Err(BackendError::Unusable { role: "program", path: program, errno })
}

/// Registers this process with the agent as the process of the VM. exec(2) closes the received file
/// descriptors, and the other VMM opens the memory files by path.
fn attach_to_agent(guest: &Guest) -> Result<(), BackendError> {
    let Some(socket) = &guest.config.agent else { return Ok(()) };
    let memory =
        source::with_agent(&guest.config, socket, |agent, vm| agent.attach(vm, MemoryForm::Descriptors))?;
    if slice_epochs(&memory) == guest.slices {
        Ok(())
    } else {
        Err(BackendError::ReservationChanged(guest.config.vm.to_string()))
    }
}

/// Returns the path of the first file with this name in PATH. If there is no such file, returns
/// only the name, which [`check_program`] then rejects.
fn find_in_path(name: &str) -> PathBuf {
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
