//! The command line of Tarn, as a library so that tests and packaging can hold it: the words people type, the calls they
//! become, and how answers and refusals are printed. It decides nothing that a service decides.
#![forbid(unsafe_code)]

mod admin;
mod args;
mod backup;
mod describe;
mod doctor;
mod get;
mod known;
mod models;
mod scheduler;
mod shares;
mod table;
mod telemetry;
mod top;
mod view;
mod watch;
mod words;

use std::{ffi::OsString, process::ExitCode};

use clap::{CommandFactory as _, FromArgMatches as _};

use args::Explained;
pub use args::{Ask, Cli, Command};
pub use cli_runtime::{Connection, Exit, Failure, Format, Global};
use cli_runtime::{failure, hint, lists, open, print};
use evaluate::replay;

/// Every word that `tarn` understands, for manual pages and completions.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Does what the words ask and says how it went, on stdout and stderr and as the exit code.
pub async fn run(words: Vec<OsString>) -> ExitCode {
    let parsed = args::brief(Cli::command()).try_get_matches_from(&words);
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(misread) => return misunderstood(&misread, &words),
    };
    let format = cli.global.output;
    match dispatch(cli).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(format),
    }
}

/// Help and version are no failures; people get clap's own words, programs that asked for JSON get JSON.
fn misunderstood(misread: &clap::Error, words: &[OsString]) -> ExitCode {
    if misread.use_stderr() && args::asks_for_json(words) {
        let said = misread.to_string();
        let said = said.trim_start_matches("error: ").split("\n\n").next().unwrap_or_default();
        return Failure::Words(said.to_owned()).report(Format::Json);
    }
    // With the terminal gone there is nobody left to tell; the exit code still says it.
    let _ = misread.print();
    if misread.use_stderr() { ExitCode::from(Exit::Usage as u8) } else { ExitCode::SUCCESS }
}

async fn dispatch(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Ask(ask) => asked(ask, &cli.global).await,
        Command::Replay(args) => replay::run(args, &cli.global).await,
        Command::StandInVm(args) => replay::stand_in(&args),
        Command::Evaluate(subject) => evaluate::run(subject, cli.global.output),
        Command::Doctor(args) => doctor::run(args, &cli.global).await,
        Command::Completions(asked) => words::completions(asked.shell),
        Command::Man(asked) => words::man(&asked),
    }
}

async fn asked(ask: Ask, global: &Global) -> Result<(), Failure> {
    let to = Connection::open(global).await?;
    let names = known::Names::of(&ask);
    match answered(ask, &to, global).await {
        Err(refused) => Err(names.explain(refused, &to).await),
        done => done,
    }
}

async fn answered(ask: Ask, to: &Connection, global: &Global) -> Result<(), Failure> {
    let format = global.output;
    match ask {
        Ask::Get(kind) => get::run(kind, to, format).await,
        Ask::Describe(subject) => describe::run(subject, to, format).await,
        Ask::Explain(Explained::Subject(subject)) => describe::explain(subject, to, format).await,
        Ask::Explain(Explained::Shares(of)) => shares::explain(of, to, format).await,
        Ask::PlanVm(args) => scheduler::plan_vm(args, to, format).await,
        Ask::Reserve(args) => scheduler::reserve(args, to, format).await,
        Ask::WaitReady(args) => scheduler::wait_ready(args.which, to, format).await,
        Ask::Commit(args) => scheduler::commit(args.which, to, format).await,
        Ask::Release(args) => scheduler::release(args, to, format).await,
        Ask::Cordon(place) => admin::cordon(place, to, format).await,
        Ask::Uncordon(mended) => admin::uncordon(mended, to, format).await,
        Ask::Drain(place) => admin::drain(place, to, format).await,
        Ask::Fence(args) => admin::fence(args, to, format).await,
        Ask::Backup(args) => backup::run(&args, to, format).await,
        Ask::Watch(args) => watch::run(args.stream, to, global.timeout, format).await,
        Ask::Migration(asked) => scheduler::migration(asked, to, format).await,
        Ask::Weigh(args) => shares::weigh(args, to, format).await,
        Ask::Train(what) => models::train(what, to, format).await,
        Ask::Promote(args) => models::promote(args, to, format).await,
        Ask::Rollback(of) => models::roll_back(of, to, format).await,
        Ask::ImportModel(args) => models::import(args, to, format).await,
        Ask::ExportModel(args) => models::export(args, to).await,
        Ask::Telemetry(what) => telemetry::run(what, to, format).await,
        Ask::Top => top::run(to).await,
    }
}
