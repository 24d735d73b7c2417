//! Command-line client `tarn`, as a library for tests and packaging. It parses arguments, calls the
//! pool manager, and prints responses and errors. The services make all decisions.
#![forbid(unsafe_code)]

mod admin;
mod args;
mod backup;
mod completions;
mod describe;
mod doctor;
mod evictions;
mod explain_tenant;
mod get;
mod models;
mod scheduler;
mod shares;
mod soft_memory;
mod suggestions;
mod table;
mod telemetry;
mod tenants;
mod top;
mod usage;
mod view;
mod watch;

use std::{ffi::OsString, process::ExitCode};

use clap::{CommandFactory as _, FromArgMatches as _};

pub use args::{Cli, Command, ManagerCommand};
use args::{ExplainSubject, Set};
pub use cli_runtime::{Connection, Exit, Failure, Format, Global};
use cli_runtime::{failure, hint, lists, open, print};
use evaluate::{plan, replay};

/// Returns the definition of the command line, for manual pages and completions.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command in `arguments`, which start with the program name. Prints the result on stdout
/// or the error on stderr, and returns the exit code.
pub async fn run(arguments: Vec<OsString>) -> ExitCode {
    let mut command = args::hide_global_options(Cli::command());
    let parsed = command.try_get_matches_from_mut(&arguments);
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => return report_parse_error(&usage::with_printable_values(error, &command), &arguments),
    };
    let format = cli.global.output;
    match dispatch(cli).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(format),
    }
}

/// Prints a parse error in clap's format, or as JSON if the arguments request JSON. Clap also
/// reports `--help` and `--version` as parse errors; their exit code is 0.
fn report_parse_error(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    if error.use_stderr() && args::is_json_requested(arguments) {
        let message = error.to_string();
        let message = message.trim_start_matches("error: ").split("\n\n").next().unwrap_or_default();
        return Failure::Usage(message.to_owned()).report(Format::Json);
    }
    // The exit code reports the error even if stderr is closed.
    let _ = error.print();
    if error.use_stderr() { ExitCode::from(Exit::Usage as u8) } else { ExitCode::SUCCESS }
}

async fn dispatch(cli: Cli) -> Result<(), Failure> {
    if cli.global.output == Format::Csv && !matches!(cli.command, Command::Plan(_)) {
        return Err(Failure::InvalidValue {
            field: "--output",
            value: "csv".to_owned(),
            rule: "must be table, wide, json or yaml, except for `tarn plan`".into(),
        });
    }
    match cli.command {
        Command::Manager(command) => run_with_manager(command, &cli.global).await,
        Command::Replay(args) => replay::run(args, &cli.global).await,
        Command::Plan(args) => plan::run(&args, cli.global.output),
        Command::TestVmm(args) => replay::test_vmm(&args),
        Command::Evaluate(subject) => evaluate::run(subject, cli.global.output),
        Command::Doctor(args) => doctor::run(args, &cli.global).await,
        Command::Completions(args) => completions::print(args.shell),
        Command::Man(args) => completions::write_man_pages(&args),
    }
}

/// Connects to the manager, runs a command and adds a hint to its error.
async fn run_with_manager(command: ManagerCommand, global: &Global) -> Result<(), Failure> {
    let manager = Connection::open(global).await?;
    let names = suggestions::Names::from_command(&command);
    match dispatch_to_manager(command, &manager, global).await {
        Err(failure) => Err(names.add_hint(failure, &manager).await),
        done => done,
    }
}

async fn dispatch_to_manager(
    command: ManagerCommand,
    manager: &Connection,
    global: &Global,
) -> Result<(), Failure> {
    use ManagerCommand as C;
    let format = global.output;
    match command {
        C::Get(resource) => get::run(resource, manager, format).await,
        C::Set(Set::Weights(args)) => shares::set_weights(args, manager, format).await,
        C::Describe(subject) => describe::run(subject, manager, format).await,
        C::Explain(ExplainSubject::Resource(subject)) => describe::explain(subject, manager, format).await,
        C::Explain(ExplainSubject::Shares(host)) => shares::explain(host, manager, format).await,
        C::Explain(ExplainSubject::Tenant(args)) => explain_tenant::run(args, manager, format).await,
        C::PlanVm(args) => scheduler::plan_vm(args, manager, format).await,
        C::Reserve(args) => scheduler::reserve(args, manager, format).await,
        C::WaitReady(args) => scheduler::wait_ready(args.target, manager, format).await,
        C::Commit(args) => scheduler::commit(args.target, manager, format).await,
        C::Release(args) => scheduler::release(args, manager, format).await,
        C::Rehome(args) => scheduler::rehome(args, manager, format).await,
        C::Cordon(target) => admin::cordon(target, manager, format).await,
        C::Uncordon(target) => admin::uncordon(target, manager, format).await,
        C::Drain(target) => admin::drain(target, manager, format).await,
        C::Fence(args) => admin::fence(args, manager, format).await,
        C::Backup(args) => backup::run(&args, manager, format).await,
        C::Watch(args) => watch::run(args.stream, manager, global.timeout, format).await,
        C::Migration(command) => scheduler::migration(command, manager, format).await,
        C::Train(args) => models::train(args, manager, format).await,
        C::Promote(args) => models::promote(args, manager, format).await,
        C::Rollback(args) => models::roll_back(args, manager, format).await,
        C::ImportModel(args) => models::import(args, manager, format).await,
        C::ExportModel(args) => models::export(args, manager).await,
        C::Telemetry(command) => telemetry::run(command, manager, format).await,
        C::Top => top::run(manager, format).await,
    }
}
