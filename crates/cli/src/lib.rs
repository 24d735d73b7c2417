//! The command line of Tarn, as a library so that tests and packaging can hold it: the words people type, the calls they
//! become, and how answers and refusals are printed. It decides nothing that a service decides.
#![forbid(unsafe_code)]

mod admin;
mod args;
mod connect;
mod describe;
mod failure;
mod get;
mod hint;
mod known;
mod lists;
mod print;
mod scheduler;
mod table;
mod view;
mod watch;
mod words;

use std::process::ExitCode;

pub use args::{Cli, Command, Format, Global};
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

/// Commands that need no manager, and one that is about not reaching it; all others get a connection.
async fn dispatch(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Completions(asked) => words::completions(asked.shell),
        Command::Man(asked) => words::man(&asked),
        command => {
            let to = Connection::open(&cli.global).await?;
            let names = known::Names::of(&command);
            match ask(command, &to, cli.global.output).await {
                Err(refused) => Err(names.explain(refused, &to).await),
                done => done,
            }
        }
    }
}

async fn ask(command: Command, to: &Connection, format: Format) -> Result<(), Failure> {
    match command {
        Command::Get(kind) => get::run(kind, to, format).await,
        Command::Describe(subject) => describe::run(subject, to, format).await,
        Command::Explain(subject) => describe::explain(subject, to, format).await,
        Command::PlanVm(args) => scheduler::plan_vm(args, to, format).await,
        Command::Reserve(args) => scheduler::reserve(args, to, format).await,
        Command::WaitReady(args) => scheduler::wait_ready(args.which, to, format).await,
        Command::Commit(args) => scheduler::commit(args.which, to, format).await,
        Command::Release(args) => scheduler::release(args, to, format).await,
        Command::Cordon(place) => admin::cordon(place, to, format).await,
        Command::Uncordon(mended) => admin::uncordon(mended, to, format).await,
        Command::Drain(place) => admin::drain(place, to, format).await,
        Command::Fence(args) => admin::fence(args, to, format).await,
        Command::Watch(args) => watch::run(args.stream, to, format).await,
        Command::Migration(asked) => scheduler::migration(asked, to, format).await,
        Command::Completions(_) | Command::Man(_) => unreachable!("answered without a connection"),
    }
}
