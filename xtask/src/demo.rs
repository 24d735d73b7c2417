//! `cargo xtask demo`: a rack on this machine.
use crate::failure::Failure;
/// What to show.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {}
/// Shows it.
pub fn run(_: &Args) -> Result<(), Failure> {
    Ok(())
}
