//! Runs the guest part of the demo inside an emulated host. The host runs `xtask demo-guest`. The
//! demo reads the output of this command from the console of the host.

use std::path::PathBuf;

use emulated_host::{Artifacts, Host, Initrd};

use super::{BootFiles, GuestReport, Interrupt, KERNEL_VERSION, Programs, run_guest_rack};
use crate::failure::Failure;

/// Prefix of the output line that contains the report as JSON.
const RESULT_PREFIX: &str = "GUEST ";
/// Prefix of the host's output lines that the demo prints. Other lines are not printed.
const DETAIL_PREFIX: &str = "    ";

/// Options of `demo-guest`.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoGuestArgs {
    #[arg(long)]
    kernel: PathBuf,
    #[arg(long)]
    initrd: PathBuf,
}

/// Boots an emulated host that runs the guest, and returns the report of the guest.
pub(super) fn run(
    programs: &Programs,
    interrupt: &Interrupt,
    artifacts: &Artifacts,
    guest: &Initrd,
) -> Result<GuestReport, Failure> {
    let script = format!(
        "export TARN_BIN_DIR=/bin\nxtask demo-guest --kernel /guest/{KERNEL_VERSION} --initrd /guest/initrd 2>&1"
    );
    let host = Host::new(artifacts, &script)?;
    let programs = [&programs.manager, &programs.agent, &programs.tarn, &programs.vmm, &programs.xtask];
    programs.into_iter().try_for_each(|program| host.add_program(program))?;
    host.add_guest_initrd("initrd", guest)?;
    let on_line = |line: &str| {
        if line.starts_with(DETAIL_PREFIX) {
            println!("{line}");
        }
    };
    let output = host.run(on_line, || interrupt.should_continue())?;
    let result = output.lines().find_map(|line| line.strip_prefix(RESULT_PREFIX));
    let result = result.ok_or_else(|| {
        Failure::BadResult(format!("no report of a guest in the output of the emulated host:\n{output}"))
    })?;
    serde_json::from_str(result).map_err(|error| Failure::UnexpectedOutput {
        program: "the emulated host".to_owned(),
        reason: error.to_string(),
    })
}

impl DemoGuestArgs {
    /// Runs the guest inside the emulated host.
    ///
    /// # Errors
    /// Returns the errors of [`run_guest_rack`].
    pub fn run(&self) -> Result<(), Failure> {
        let boot = BootFiles { kernel: self.kernel.clone(), initrd: self.initrd.clone() };
        let report = run_guest_rack(&super::super::find_programs()?, &Interrupt::new()?, &boot)?;
        let report = serde_json::to_string(&report).expect("a report has only strings and numbers");
        println!("{RESULT_PREFIX}{report}");
        Ok(())
    }
}
