//! The command line of Tarn, as a library so that tests and packaging can hold it: the words people type, the calls they
//! become, and how answers and refusals are printed. It decides nothing that a service decides.
#![forbid(unsafe_code)]

mod admin;
mod args;
mod connect;
mod describe;
mod doctor;
mod failure;
mod get;
mod hint;
mod known;
mod lists;
mod print;
mod scheduler;
mod table;
mod top;
mod view;
mod watch;
mod words;

use std::process::ExitCode;

pub use args::{Ask, Cli, Command, Format, Global};
pub use connect::Connection;
pub use failure::{Exit, Failure};

/// Every word that `tarn` understands, for manual pages and completions.
pub fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Does what was asked and says how it went, on stdout and stderr and as the exit code.
pub async fn run(cli: Cli) -> ExitCode {
    let format = cli.global.output;
    match dispatch(cli).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(format),
    }
}

async fn dispatch(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Ask(ask) => asked(ask, &cli.global).await,
        Command::Doctor => doctor::run(&cli.global).await,
        Command::Completions(asked) => words::completions(asked.shell),
        Command::Man(asked) => words::man(&asked),
    }
}

async fn asked(ask: Ask, global: &Global) -> Result<(), Failure> {
    let to = Connection::open(global).await?;
    let names = known::Names::of(&ask);
    match answered(ask, &to, global.output).await {
        Err(refused) => Err(names.explain(refused, &to).await),
        done => done,
    }
}

async fn answered(ask: Ask, to: &Connection, format: Format) -> Result<(), Failure> {
    match ask {
        Ask::Get(kind) => get::run(kind, to, format).await,
        Ask::Describe(subject) => describe::run(subject, to, format).await,
        Ask::Explain(subject) => describe::explain(subject, to, format).await,
        Ask::PlanVm(args) => scheduler::plan_vm(args, to, format).await,
        Ask::Reserve(args) => scheduler::reserve(args, to, format).await,
        Ask::WaitReady(args) => scheduler::wait_ready(args.which, to, format).await,
        Ask::Commit(args) => scheduler::commit(args.which, to, format).await,
        Ask::Release(args) => scheduler::release(args, to, format).await,
        Ask::Cordon(place) => admin::cordon(place, to, format).await,
        Ask::Uncordon(mended) => admin::uncordon(mended, to, format).await,
        Ask::Drain(place) => admin::drain(place, to, format).await,
        Ask::Fence(args) => admin::fence(args, to, format).await,
        Ask::Watch(args) => watch::run(args.stream, to, format).await,
        Ask::Migration(asked) => scheduler::migration(asked, to, format).await,
        Ask::Top => top::run(to).await,
    }
}
