//! The same guest under another VMM, made from the same reservation and the same layout: `guest` says what it is, the others
//! write it in the words of one VMM each, and `exec` becomes one. Slices come from the agent as paths; local memory the other
//! VMM makes itself.

pub mod cloud_hypervisor;
pub mod exec;
pub mod guest;
pub mod libvirt;
pub mod qemu;

use std::{io, path::PathBuf};

use self::guest::Guest;
use crate::{config::GuestArgs, layout::ShapeError, options::OptionError, source::SourceError};

/// A guest for another VMM, as written.
#[derive(Clone, Debug, clap::Args)]
pub struct PrintArgs {
    /// For which VMM
    #[arg(long)]
    pub vmm: Vmm,
    /// In which form: qemu has shell and json (an array), cloud-hypervisor json (the body of vm.create) and shell, libvirt xml
    #[arg(short, long)]
    pub output: Option<Output>,
    #[command(flatten)]
    guest: GuestArgs,
}

/// The other VMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Vmm {
    /// QEMU.
    Qemu,
    /// Cloud Hypervisor.
    CloudHypervisor,
    /// QEMU, by way of libvirt.
    Libvirt,
}

/// How a guest can be written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// A command for a shell.
    Shell,
    /// JSON.
    Json,
    /// XML.
    Xml,
}

/// Why there is no such guest under another VMM.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// An option.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// No memory.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A guest cannot be like that.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The other VMM has no words for it.
    #[error("{vmm} cannot have this guest: {reason}")]
    Unsupported {
        /// Which one.
        vmm: &'static str,
        /// What it cannot, and why.
        reason: String,
    },
    /// It has no such form.
    #[error("output: {vmm:?} has no form {output:?}")]
    Output {
        /// Which one.
        vmm: Vmm,
        /// What was asked for.
        output: Output,
    },
    /// A path that no text can hold, or none at all.
    #[error("{} cannot be written as an absolute path", path.display())]
    Path {
        /// Which one.
        path: PathBuf,
    },
    /// A file or program that is needed cannot be used.
    #[error("{role}: cannot use {}", path.display())]
    Unusable {
        /// What it is for.
        role: &'static str,
        /// Which one.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// The reservation is another one than a moment ago.
    #[error("the memory of VM {0} has changed meanwhile: try again")]
    ReservationChanged(String),
}

/// Says what starts the guest under another VMM. Nobody is registered as the VM.
///
/// # Errors
/// [`BackendError`]
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

/// A command with one option a line.
fn shell(program: &str, options: &[Vec<String>]) -> String {
    let quoted = |words: &Vec<String>| {
        let words = words.iter().map(|word| shlex::try_quote(word).expect("arguments hold no NUL"));
        words.collect::<Vec<_>>().join(" ")
    };
    let lines: Vec<String> = options.iter().map(quoted).collect();
    format!("{program} \\\n    {}\n", lines.join(" \\\n    "))
}

#[cfg(test)]
mod tests;
