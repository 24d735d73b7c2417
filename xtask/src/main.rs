//! Development tasks of this repository: `cargo xtask TASK`. Each task has its own file. Tasks
//! build and run the services as programs; they do not depend on the code of the services.
#![forbid(unsafe_code)]

mod apt;
mod artifacts;
mod bench;
mod book;
mod debian;
mod demo;
mod etcd;
mod failure;
mod install;
mod libvirt;
mod lightgbm;
mod line_figure;
mod lint;
mod man;
mod mutants;
mod ns3;
mod rack;
mod redis;
mod repository;
mod sim;
mod step;
mod test;
mod tidy;
mod tools;
mod valgrind;
mod wait;

use std::process::ExitCode;

use clap::Parser;

/// Development tasks of the Tarn repository
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", max_term_width = 100)]
enum Task {
    /// Run a demo on this machine: a rack of real processes, a trace of VMs, a host that loses
    /// power and a manager that is killed
    Demo(demo::Args),
    /// Run the guest part of the demo inside an emulated host
    #[command(hide = true)]
    DemoGuest(demo::guest::DemoGuestArgs),
    /// Run a rack of hosts emulated by QEMU, with shared CXL devices, agents and a manager, until
    /// Ctrl-C
    Rack(rack::Args),
    /// Build everything and run all tests
    Test(test::Args),
    /// Check formatting, clippy warnings, documentation and licences of dependencies
    Lint,
    /// Check the rules of this repository: dependencies, headers, pure crates, sizes, limits, links
    Tidy,
    /// Run the benchmarks and print performance ratios to etcd, QEMU, LightGBM and Redis
    Bench(bench::Args),
    /// Run deterministic simulations of racks, one per random seed
    Sim(sim::Args),
    /// Install programs, the C library of soft memory, systemd units and manual pages
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
