//! Runs a guest under another VMM, with the same reservation and the same layout. `guest` describes
//! the guest. `qemu`, `cloud_hypervisor` and `libvirt` each generate the arguments of one VMM, and
//! `exec` starts a VMM. The agent provides the files of the slices. The other VMM allocates the
//! local memory.

pub mod cloud_hypervisor;
pub mod exec;
pub mod guest;
pub mod libvirt;
pub mod qemu;

use std::{io, path::PathBuf};

use self::guest::Guest;
use crate::{config::GuestArgs, layout::ShapeError, options::OptionError, source::SourceError};

/// Options of the command `args`.
#[derive(Clone, Debug, clap::Args)]
pub struct PrintArgs {
    /// VMM to generate arguments for
    #[arg(long)]
    pub vmm: Vmm,
    /// Format of the arguments: shell or json (an array) for qemu; json (the body of vm.create) or
    /// shell for cloud-hypervisor; xml for libvirt
    #[arg(short, long)]
    pub output: Option<Output>,
    #[command(flatten)]
    guest: GuestArgs,
}

/// VMM for which arguments can be generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Vmm {
    /// QEMU, started directly.
    Qemu,
    /// Cloud Hypervisor.
    CloudHypervisor,
    /// QEMU, managed by libvirt.
    Libvirt,
}

/// Format of generated arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// Shell command with all arguments.
    Shell,
    /// JSON, for programs.
    Json,
    /// Domain XML of libvirt.
    Xml,
}

/// Error returned when a guest cannot run under another VMM.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// A command-line option is invalid.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The guest's memory cannot be acquired from the agent.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The guest cannot have the requested NUMA nodes.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The other VMM does not support the guest.
    #[error("{vmm} does not support this guest: {reason}")]
    Unsupported {
        /// Name of the VMM.
        vmm: &'static str,
        /// Property of the guest that the VMM does not support.
        reason: String,
    },
    /// Arguments for the VMM cannot be generated in the requested format.
    #[error("--output: {vmm:?} does not support {output:?}")]
    Output {
        /// Requested VMM.
        vmm: Vmm,
        /// Requested format.
        output: Output,
    },
    /// A path cannot be passed to the VMM: it is not UTF-8 or cannot be made absolute.
    #[error("path {} must be UTF-8 and convertible to an absolute path", path.display())]
    Path {
        /// Path as given in the options.
        path: PathBuf,
    },
    /// A required file or program is not accessible.
    #[error("--{role}: cannot use {}", path.display())]
    Unusable {
        /// Name of the option that contains the path.
        role: &'static str,
        /// Path that is not accessible.
        path: PathBuf,
        /// Error returned by the system call.
        #[source]
        errno: io::Error,
    },
    /// The reservation of a VM changed after its memory was inspected and before this process was
    /// attached.
    #[error("the memory of VM {0} changed during the start: try again")]
    ReservationChanged(String),
}

/// Generates the arguments that start the guest under another VMM. Does not register a process with
/// the agent.
///
/// # Errors
/// [`BackendError`] if the options are invalid, or the VMM does not support the guest or the
/// format.
pub fn render(args: PrintArgs) -> Result<String, BackendError> {
    let guest = Guest::inspect(args.guest.check()?)?;
    match (args.vmm, args.output) {
        (Vmm::Qemu, None | Some(Output::Shell)) => {
            Ok(to_shell_command(qemu::VMM_PROGRAM, &qemu::options(&guest)?))
        }
        (Vmm::Qemu, Some(Output::Json)) => Ok(to_json_text(&qemu::options(&guest)?.concat().into())),
        (Vmm::CloudHypervisor, None | Some(Output::Json)) => {
            Ok(to_json_text(&cloud_hypervisor::vm_config(&guest)?))
        }
        (Vmm::CloudHypervisor, Some(Output::Shell)) => {
            Ok(to_shell_command(cloud_hypervisor::VMM_PROGRAM, &cloud_hypervisor::options(&guest)?))
        }
        (Vmm::Libvirt, None | Some(Output::Xml)) => libvirt::domain_xml(&guest),
        (vmm, Some(output)) => Err(BackendError::Output { vmm, output }),
    }
}

fn to_json_text(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

/// Formats a shell command with one option per line.
fn to_shell_command(program: &str, options: &[Vec<String>]) -> String {
    let quoted = |arguments: &Vec<String>| {
        let arguments =
            arguments.iter().map(|word| shlex::try_quote(word).expect("arguments contain no NUL"));
        arguments.collect::<Vec<_>>().join(" ")
    };
    let lines: Vec<String> = options.iter().map(quoted).collect();
    format!("{program} \\\n    {}\n", lines.join(" \\\n    "))
}

#[cfg(test)]
mod tests;
