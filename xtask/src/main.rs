//! Development tasks of this repository: `cargo xtask TASK`, one file per task. Tasks build and run
//! the services as programs and do not depend on their code.
#![forbid(unsafe_code)]

mod apt;
mod artifacts;
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

/// Development tasks of the Tarn repository
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", max_term_width = 100)]
enum Task {
    /// Run a demo rack on this machine: real processes, a trace of VMs, a lost host, a killed
    /// manager
    Demo(demo::Args),
    /// Run the demo's guest inside an emulated host
    #[command(hide = true)]
    DemoGuest(demo::guest::DemoGuestArgs),
    /// Run a rack of hosts emulated by QEMU, with shared CXL devices, agents and a manager, until
    /// Ctrl-C
    Rack(rack::Args),
    /// Build everything and run all tests
    Test(test::Args),
    /// Check formatting, clippy, documentation and licences of dependencies
    Lint,
    /// Check the repository's own rules: dependencies, headers, pure crates, sizes, limits, links
    Tidy,
    /// Run the benchmarks, and print the ratios to etcd, QEMU and LightGBM
    Bench(bench::Args),
    /// Simulate racks deterministically, one per random seed
    Sim(sim::Args),
    /// Install programs, systemd units and manual pages
    Install(install::Args),
    /// Write the manual pages of `tarn` to target/man
    Man,
    /// Build the documentation as a searchable site in target/book
    Book,
    /// Run mutation tests of the crate `pool`
    Mutants(mutants::Args),
}

fn main() -> ExitCode {
    let result = match Task::parse() {
        Task::Demo(args) => demo::run(&args),
        Task::DemoGuest(args) => args.run(),
        Task::Rack(args) => rack::run(args),
        Task::Test(args) => test::run(&args),
        Task::Lint => lint::run(),
        Task::Tidy => tidy::run(),
        Task::Bench(args) => bench::run(&args),
        Task::Sim(args) => sim::run(&args),
        Task::Install(args) => install::run(&args),
        Task::Man => man::run(),
        Task::Book => book::run(),
        Task::Mutants(args) => mutants::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
