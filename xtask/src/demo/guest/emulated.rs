//! The same act inside an emulated host: this very program plays it there, and its words come back over the console.

use std::path::PathBuf;

use emulated_host::{Artifacts, Host, HostError, Initrd};

use super::{Boot, GuestTold, KERNEL, Patience, Programs, act};
use crate::failure::Failure;

/// How the line with the result begins.
const RESULT: &str = "GUEST ";
/// How lines for people begin.
const NOTE: &str = "    ";

/// Settings of the demo inside a host.
#[derive(Clone, Debug, clap::Args)]
pub struct Inside {
    #[arg(long)]
    kernel: PathBuf,
    #[arg(long)]
    initrd: PathBuf,
}

/// Boots a host that plays the act.
pub(super) fn play(
    programs: &Programs,
    patience: &Patience,
    bed: &Artifacts,
    guest: &Initrd,
) -> Result<GuestTold, Failure> {
    let script = format!(
        "export TARN_BIN_DIR=/bin\nxtask guest-act --kernel /guest/{KERNEL} --initrd /guest/initrd 2>&1"
    );
    let host = Host::new(bed, &script)?;
    let all = [&programs.manager, &programs.agent, &programs.tarn, &programs.vmm, &programs.own];
    all.into_iter().try_for_each(|program| host.program(program))?;
    host.guest("initrd", guest)?;
    let see = |line: &str| {
        if line.starts_with(NOTE) {
            println!("{line}");
        }
    };
    let said = host.run(see, || patience.lasts()).map_err(|error| match error {
        HostError::Interrupted => Failure::Interrupted,
        other => other.into(),
    })?;
    let result = said.lines().find_map(|line| line.strip_prefix(RESULT));
    let result =
        result.ok_or_else(|| Failure::Result(format!("the emulated host says of no guest:\n{said}")))?;
    serde_json::from_str(result)
        .map_err(|wrong| Failure::Answer { program: "the emulated host".to_owned(), why: wrong.to_string() })
}

impl Inside {
    /// Plays the act, as the first program of a host.
    ///
    /// # Errors
    /// As [`act`].
    pub fn run(&self) -> Result<(), Failure> {
        let boot = Boot { kernel: self.kernel.clone(), initrd: self.initrd.clone() };
        let told = act(&super::super::programs()?, &Patience::new()?, &boot)?;
        let told = serde_json::to_string(&told).expect("it has only texts and numbers");
        println!("{RESULT}{told}");
        Ok(())
    }
}
