//! Runs the same guest under other VMMs, from the same reservation and the same layout. `guest`
//! describes the guest, `qemu`, `cloud_hypervisor` and `libvirt` each generate one VMM's arguments,
//! and `exec` starts a VMM. Slices are files of the agent; local memory is allocated by the other
//! VMM.

pub mod cloud_hypervisor;
pub mod exec;
pub mod guest;
pub mod libvirt;
pub mod qemu;

use std::{io, path::PathBuf};

use self::guest::Guest;
use crate::{config::GuestArgs, layout::ShapeError, options::OptionError, source::SourceError};

/// Options of `args`.
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

/// Other VMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Vmm {
    /// QEMU.
    Qemu,
    /// Cloud Hypervisor.
    CloudHypervisor,
    /// QEMU, managed by libvirt.
    Libvirt,
}

/// Format of generated arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// A shell command.
    Shell,
    /// JSON.
    Json,
    /// XML.
    Xml,
}

/// Error returned when a guest cannot run under another VMM.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// An option is invalid.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The memory cannot be acquired.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The layout is invalid.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The other VMM does not support the guest.
    #[error("{vmm} does not support this guest: {reason}")]
    Unsupported {
        /// Name of the VMM.
        vmm: &'static str,
        /// The unsupported property.
        reason: String,
    },
    /// The VMM's arguments do not have this format.
    #[error("output: {vmm:?} does not support {output:?}")]
    Output {
        /// The VMM.
        vmm: Vmm,
        /// The requested format.
        output: Output,
    },
    /// A path is not UTF-8 or cannot be made absolute.
    #[error("{} cannot be written as an absolute path", path.display())]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// A required file or program is not accessible.
    #[error("{role}: cannot use {}", path.display())]
    Unusable {
        /// Option that names the file.
        role: &'static str,
        /// The path.
        path: PathBuf,
        /// The underlying error.
        #[source]
        errno: io::Error,
    },
    /// The reservation changed between inspection and attach.
    #[error("the memory of VM {0} changed during the start: try again")]
    ReservationChanged(String),
}

/// Generates the arguments that start the guest under another VMM. No process is registered as the
/// VM.
///
/// # Errors
/// See [`BackendError`].
pub fn render(args: PrintArgs) -> Result<String, BackendError> {
    let guest = Guest::inspect(args.guest.check()?)?;
    match (args.vmm, args.output) {
        (Vmm::Qemu, None | Some(Output::Shell)) => Ok(shell(qemu::PROGRAM, &qemu::options(&guest)?)),
        (Vmm::Qemu, Some(Output::Json)) => Ok(json(&qemu::options(&guest)?.concat().into())),
        (Vmm::CloudHypervisor, None | Some(Output::Json)) => Ok(json(&cloud_hypervisor::vm_config(&guest)?)),
        (Vmm::CloudHypervisor, Some(Output::Shell)) => {
            Ok(shell(cloud_hypervisor::PROGRAM, &cloud_hypervisor::options(&guest)?))
        }
        (Vmm::Libvirt, None | Some(Output::Xml)) => libvirt::domain(&guest),
        (vmm, Some(output)) => Err(BackendError::Output { vmm, output }),
    }
}

fn json(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

/// Formats a shell command with one option per line.
fn shell(program: &str, options: &[Vec<String>]) -> String {
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
