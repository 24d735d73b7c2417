//! Kills and pauses the leader of a rack again and again, under load, and prints the times until another manager has
//! acknowledged a reservation. Fails if the history of all calls is not linearizable, or a slice has two owners.

use std::{
    collections::BTreeSet,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use rustix::process::Signal;
use tests::{
    elected_rack::ElectedRack,
    failover_load::{self, History, Load},
};

/// Number of managers: the leader and one standby.
const MANAGERS: usize = 2;
/// Time in which another manager must take over.
const FAILOVER_TIMEOUT: Duration = Duration::from_secs(120);
/// Time between two faults in which the clients work.
const CALM: Duration = Duration::from_millis(300);
/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Measure fail-overs between two managers with a real etcd
#[derive(Debug, Parser)]
struct Args {
    /// Number of times that the leader is killed
    #[arg(long, default_value_t = 100)]
    kills: usize,
    /// Number of times that the leader is paused for longer than its lease
    #[arg(long, default_value_t = 100)]
    pauses: usize,
    /// Lease of the managers, in seconds
    #[arg(long, default_value_t = 5)]
    lease: u64,
    /// Number of members of etcd
    #[arg(long, default_value_t = 3)]
    members: usize,
    /// Number of clients
    #[arg(long, default_value_t = 16)]
    clients: usize,
    /// Seed of the clients
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let mut rack = ElectedRack::start(args.members, MANAGERS, args.lease).await;
    let load = Load::start(&rack, MANAGERS, args.clients, args.seed);
    for (fault, count) in [(Fault::Kill, args.kills), (Fault::Pause, args.pauses)] {
        let mut seconds = Vec::new();
        for _ in 0..count {
            seconds.push(fail_over(&mut rack, &load.history, fault).await.as_secs_f64());
        }
        print_times(fault, seconds, args.lease);
    }
    let history = load.stop();
    let (reservations, lists) = history.counts();
    let mut violations = history.check();
    violations.extend(check_device(&rack).await);
    violations.iter().for_each(|violation| println!("VIOLATION {violation}"));
    println!("{reservations} acknowledged reservations, {lists} lists, {} violations", violations.len());
    if violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Kill,
    Pause,
}

/// Kills or pauses the leader, and returns the time until another manager has acknowledged a reservation.
async fn fail_over(rack: &mut ElectedRack, history: &History, fault: Fault) -> Duration {
    wait_for_standby(rack).await;
    tokio::time::sleep(CALM).await;
    let leader = rack.wait_for_leader().await;
    let started = Instant::now();
    match fault {
        Fault::Kill => rack.kill_manager(leader),
        Fault::Pause => rack.signal_manager(leader, Signal::STOP),
    }
    let acknowledged = loop {
        if let Some(first) = history.first_acknowledgement(started, leader) {
            break first.at;
        }
        assert!(started.elapsed() < FAILOVER_TIMEOUT, "no manager takes over\n{}", rack.logs());
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    if fault == Fault::Pause {
        rack.signal_manager(leader, Signal::CONT);
        assert!(!rack.wait_for_end(leader), "the paused manager ended without an error");
    }
    rack.start_manager(leader);
    acknowledged - started
}

/// Waits until there is a leader and a standby.
async fn wait_for_standby(rack: &ElectedRack) {
    let started = Instant::now();
    loop {
        let output = rack.tarn(&["get", "managers"]);
        if output.status.success() && String::from_utf8_lossy(&output.stdout).lines().count() == MANAGERS + 1
        {
            return;
        }
        assert!(started.elapsed() < FAILOVER_TIMEOUT, "there is no standby: {output:?}\n{}", rack.logs());
        tokio::time::sleep(10 * POLL_INTERVAL).await;
    }
}

fn print_times(fault: Fault, mut seconds: Vec<f64>, lease: u64) {
    seconds.sort_by(f64::total_cmp);
    let Some(last) = seconds.len().checked_sub(1) else { return };
    let quantile = |percent: usize| seconds[(last * percent).div_ceil(100)];
    let (median, p99, max) = (quantile(50), quantile(99), seconds[last]);
    let name = match fault {
        Fault::Kill => "kill",
        Fault::Pause => "pause",
    };
    println!(
        "{name}: {} fail-overs, median {median:.2} s, p99 {p99:.2} s, max {max:.2} s, p99 / lease {:.2}",
        seconds.len(),
        p99 / lease as f64
    );
}

/// Checks the files of the device against the slices that are not free, after the clients have stopped.
async fn check_device(rack: &ElectedRack) -> Vec<String> {
    let leader = rack.wait_for_leader().await;
    let started = Instant::now();
    loop {
        let slices = rack.admin(leader).await.list_slices(proto::v1::ListSlicesRequest::default()).await;
        let slices = slices.expect("the manager replies").into_inner().slices;
        let owned: BTreeSet<u32> = slices
            .iter()
            .filter(|slice| slice.state() != proto::v1::SliceState::Free)
            .map(|slice| slice.slice)
            .collect();
        let violations = failover_load::check_device(rack, &owned);
        // Slices of released VMs change their state until they are free.
        if violations.is_empty() || started.elapsed() > FAILOVER_TIMEOUT {
            return violations;
        }
        tokio::time::sleep(100 * POLL_INTERVAL).await;
    }
}
