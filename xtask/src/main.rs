//! The chores of this repository: `cargo xtask TASK`, one file per task. Knows the services only as programs to build and
//! to run, never their code.
#![forbid(unsafe_code)]

mod apt;
mod bed;
mod bench;
mod book;
mod debian;
mod demo;
mod failure;
mod install;
mod libvirt;
mod lightgbm;
mod lint;
mod man;
mod mutants;
mod rack;
mod repository;
mod sim;
mod step;
mod test;
mod tidy;
mod tools;
mod wait;

use std::process::ExitCode;

use clap::Parser;

/// The chores of this repository.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", max_term_width = 100)]
enum Task {
    /// A rack on this machine: real processes, a trace of VMs, a lost host, a killed manager
    Demo(demo::Args),
    /// Run the demo's guest inside an emulated host
    #[command(hide = true)]
    GuestAct(demo::guest::Inside),
    /// A rack in a box: hosts that QEMU emulates, with shared CXL devices and agents, and a manager; until Ctrl-C
    Rack(rack::Args),
    /// Every test
    Test(test::Args),
    /// Check formatting, clippy, documentation and the licences of dependencies
    Lint,
    /// Check the rules of this repository: dependencies, headers, pure crates, sizes, limits, links
    Tidy,
    /// The promised ratios, measured against etcd and QEMU on this machine
    Bench,
    /// The rack in one thread, grown from many seeds
    Sim(sim::Args),
    /// Install programs, systemd units and manual pages
    Install(install::Args),
    /// The manual pages of `tarn`, into target/man
    Man,
    /// Build the documentation as a site with search, into target/book
    Book,
    /// Small changes of the ownership code, each of which a test must notice
    Mutants(mutants::Args),
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Demo(args) => demo::run(&args),
        Task::GuestAct(inside) => inside.run(),
        Task::Rack(args) => rack::run(args),
        Task::Test(args) => test::run(&args),
        Task::Lint => lint::run(),
        Task::Tidy => tidy::run(),
        Task::Bench => bench::run(),
        Task::Sim(args) => sim::run(&args),
        Task::Install(args) => install::run(&args),
        Task::Man => man::run(),
        Task::Book => book::run(),
        Task::Mutants(args) => mutants::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
