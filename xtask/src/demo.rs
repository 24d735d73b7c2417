//! `cargo xtask demo`: a rack on this machine with real processes, a stream of VMs through the
//! scheduler's API, a host that loses power, a manager that is killed, and a host that returns.
//! This file is the sequence of events; its parts are in the folder beside it.

mod ask;
pub mod guest;
mod life;
mod processes;
mod rack;
mod replay;
mod scratch;
mod service;
mod verdict;

use std::{env, fs, path::PathBuf, time::Duration};

use ask::{Ask, Host};
use emulated_host::Artifacts;
use life::Lives;
use rack::{Plan, Rack};
use replay::{Replay, Trace};
use scratch::Scratch;
use service::{Programs, Services};

use crate::{bed, failure::Failure, step::build, wait::Patience};

/// Options of the demo.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A trace of VM arrivals, plain or gzipped [default: one made from --seed]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// A rack.toml; its addresses, paths, tokens and certificates are replaced by the demo's own [default: 4 hosts, 2 EMCs]
    #[arg(long, value_name = "FILE")]
    rack: Option<PathBuf>,
    /// Only the first VMs of the trace
    #[arg(long, value_name = "N", default_value_t = 2000)]
    limit: u64,
    /// Source of the trace
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Keep the result as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Where to look next.
const NEXT: &str = "
  docs/install.md: the same with your own hosts
  cargo run --bin tarn -- --help: what an operator can ask
  cargo xtask test: how it is known to hold

";
/// Environment variable naming a folder with ready-built programs.
pub const BIN_DIR: &str = "TARN_BIN_DIR";
/// Times of events, as fractions of the trace's VMs that were placed: early, because a small rack
/// rejects most of them.
const POWER_LOSS_AT: f64 = 0.2;
const MANAGER_KILLED_AT: f64 = 0.3;
const HOST_RETURNS_AT: f64 = 0.4;

/// How long the manager and the agents may take to be there.
const UP_WITHIN: Duration = Duration::from_secs(30);
/// The longest lease that the story waits for; with a longer one the host returns before it is missed.
const MISSED_WITHIN_MAX: Duration = Duration::from_secs(15);
/// How long the last slices may take to be scrubbed and free.
const BACK_WITHIN: Duration = Duration::from_secs(60);
/// How much later than the rack's own deadlines a change may be seen.
const SEEN_WITHIN: Duration = Duration::from_secs(5);

/// Shows it, and leaves nothing behind.
///
/// # Errors
/// A program fails, a time limit expires, the user interrupts, or the audit fails.
pub fn run(args: &Args) -> Result<(), Failure> {
    let programs = programs()?;
    let bed = Artifacts::open(&bed::ensure()?)?;
    let patience = Patience::new()?;
    let trace = Trace::new(args.trace.as_deref(), args.limit, args.seed)?;
    let scratch = Scratch::new()?;
    let told = show(args, &programs, &patience, &trace, &scratch);
    let told = told.map(|verdict| (verdict, guest::play(&programs, &patience, &scratch, &bed)));
    let cleared = scratch.clear();
    let (verdict, guest) = told.inspect_err(|_| eprintln!("\nthe demo ends here"))?;
    cleared?;
    let verdict = verdict.with_guest(guest.as_ref().ok());
    verdict.keep(args.json.as_deref())?;
    print!("{verdict}{NEXT}");
    verdict.judge().and(guest.map(drop))
}

/// Those of the folder that is named, else built now.
fn programs() -> Result<Programs, Failure> {
    let names = ["pool-manager", "host-agent", "tarn", "vmm-plugin", "xtask"];
    let [manager, agent, tarn, vmm, own] = match env::var_os(BIN_DIR).map(PathBuf::from) {
        Some(folder) => names.map(|name| folder.join(name)),
        None => build(names)?,
    };
    Ok(Programs { manager, agent, tarn, vmm, own })
}

fn show(
    args: &Args,
    programs: &Programs,
    patience: &Patience,
    trace: &Trace,
    scratch: &Scratch,
) -> Result<verdict::Verdict, Failure> {
    let rack = Plan::read(args.rack.as_deref())?.placed(scratch)?;
    let mut services = Services::new(programs, &rack, scratch);
    let told = story(programs, patience, trace, scratch, &rack, &mut services);
    // A stopped process cannot report the reason: its log can.
    let told = told.inspect_err(|_| services.print_last_words());
    let stopped = services.stop();
    told.and_then(|verdict| stopped.map(|()| verdict))
}

/// The story, from the first process to the last answer.
fn story(
    programs: &Programs,
    patience: &Patience,
    trace: &Trace,
    scratch: &Scratch,
    rack: &Rack,
    services: &mut Services<'_>,
) -> Result<verdict::Verdict, Failure> {
    let ask = Ask::new(programs, rack);
    say(&format!("a rack starts: {}", rack.summary()));
    services.init_rack()?;
    services.start_manager()?;
    patience.until("an answer of the manager", UP_WITHIN, || ask.answers())?;
    rack.hosts.iter().try_for_each(|host| services.start_agent(host))?;
    patience.until("every host up", UP_WITHIN, || all_up(&ask))?;
    note(&format!(
        "all hosts are up; look yourself: {} --endpoint {} top",
        programs.tarn.display(),
        rack.uri()
    ));

    let mut lives = Lives::watch(programs, rack, scratch)?;
    say(&format!("VMs come and go: {trace}"));
    let mut replay = Replay::start(programs, rack, trace, scratch)?;
    replay.reach(POWER_LOSS_AT, patience, services)?;

    note(&ask.table("hosts")?);
    let lost = busiest(&ask)?;
    say(&format!("host {} loses power: its agent and its VMs are gone at once", lost.host));
    let before = ask.slices_of(&lost.host)?;
    let vms = services.cut_power(&lost.host)?;
    note(&format!("{vms} VMs with pool memory ended with it; it held {} slices", before.len()));
    missed(&ask, patience, rack, &lost.host)?;

    replay.reach(MANAGER_KILLED_AT, patience, services)?;
    lives.stop();
    say("the manager is killed and starts again; guests run on, the scheduler repeats what was not answered");
    services.kill_manager();
    services.start_manager()?;
    let answered = patience.until("an answer of the manager", UP_WITHIN, || ask.answers())?;
    note(&format!("it answers again after {:.0} ms", answered.as_secs_f64() * 1000.0));

    replay.reach(HOST_RETURNS_AT, patience, services)?;
    say(&format!("host {} returns", lost.host));
    services.start_agent(&lost.host)?;
    let back = patience.until("the lost host up again", UP_WITHIN, || ask.state_is(&lost.host, &["up"]))?;
    note(&format!("it proved itself clean and is up after {:.0} ms", back.as_secs_f64() * 1000.0));

    let result = replay.finish(patience, services)?;
    patience.until("every slice back", BACK_WITHIN, || ask.nothing_drains())?;
    say(&format!("where slices of {} went when it was lost, and that all came back in the end", lost.host));
    before
        .iter()
        .filter_map(|slice| lives.after(&lost.host, *slice))
        .take(LIVES_SHOWN)
        .for_each(|life| note(&life));
    note(&ask.table("emcs")?);
    Ok(result)
}

/// Number of slices whose history is printed.
const LIVES_SHOWN: usize = 3;

/// Waits until the manager misses a host, and, where the rack fences soon, until it has cut it off.
fn missed(ask: &Ask<'_>, patience: &Patience, rack: &Rack, host: &str) -> Result<(), Failure> {
    for (after, state, words) in [
        (Some(rack.ttl), ["unknown", "fenced"], "its lease ended: it gets nothing new, its slices are kept"),
        (
            rack.fence_after,
            ["fenced", "fenced"],
            "it is fenced: its slices are taken back, scrubbed and lent again",
        ),
    ] {
        let Some(after) = after.filter(|after| *after <= MISSED_WITHIN_MAX) else {
            note("its lease is longer than this demo: its slices stay its own until it returns");
            return Ok(());
        };
        let seen = patience.until(state[0], after + SEEN_WITHIN, || ask.state_is(host, &state))?;
        note(&format!("after {:.1} s more {words}", seen.as_secs_f64()));
    }
    Ok(())
}

fn all_up(ask: &Ask<'_>) -> Result<bool, Failure> {
    Ok(ask.hosts()?.iter().all(|host| host.state == "up"))
}

/// The host with the most to lose.
fn busiest(ask: &Ask<'_>) -> Result<Host, Failure> {
    let hosts = ask.hosts()?.into_iter();
    hosts.max_by_key(|host| (host.slices, host.reservations)).ok_or_else(|| Failure::Answer {
        program: "tarn get hosts".to_owned(),
        why: "the rack has no host".to_owned(),
    })
}

fn say(words: &str) {
    println!("\n● {words}");
}

fn note(words: &str) {
    words.lines().for_each(|line| println!("    {line}"));
}

/// Writes a file of the demo's own.
fn write(path: &std::path::Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(Failure::file("write", path))
}
