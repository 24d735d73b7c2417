//! Tests of soft memory with the real agent, whose clients are processes.
//!
//! In one test, clients and the agent are killed and stopped at random times. At quiet points, the record of the agent
//! must be equal to the budgets that the clients report themselves. `TARN_SOFT_KILLS` sets the number of kills, and
//! `TARN_SEED` repeats the choices of a run, but not its timing.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{collections::BTreeMap, process::Command};

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64;
use rustix::process::Signal;
use serde_json::Value;
use tests::{
    environment::{number_from_env, seed},
    rack::Rack,
    small_guests::report_skipped,
    soft_client::{ClientStats, SoftClient},
    soft_host::SoftHost,
};

/// Number of kills if `TARN_SOFT_KILLS` is not set.
const KILLS_DEFAULT: u64 = 60;
/// Number of kills between two quiet points.
const KILLS_PER_CHECK: u64 = 20;
/// One of this number of kills ends the agent, and the others clients.
const KILLS_PER_AGENT_KILL: u32 = 10;
/// Maximum number of clients.
const CLIENTS_MAX: usize = 8;
/// Largest number of values that a request of a client adds. All clients together need more than there is.
const PUSHED_VALUES_MAX: u64 = 2000;
/// Number of attempts to find the record equal to the budgets. The agent reports once per 2 s.
const COMPARISONS_MAX: usize = 15;
/// Size of soft memory.
const SIZE_MIB: u64 = 32;
/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;

/// Client, and the state in which the test has brought it.
struct Client {
    process: SoftClient,
    is_stopped: bool,
    /// Number of replies that the test has not read.
    replies_due: usize,
}

impl Client {
    fn send(&mut self, request: &str) {
        self.process.send(request);
        self.replies_due += 1;
    }

    fn set_stopped(&mut self, is_stopped: bool) {
        self.process.signal(if is_stopped { Signal::STOP } else { Signal::CONT });
        self.is_stopped = is_stopped;
    }

    /// Waits until the client, which is not stopped, has executed all requests.
    fn finish(&mut self) {
        for _ in 0..std::mem::take(&mut self.replies_due) {
            assert!(!self.process.read_line().is_empty(), "client {} ended", self.process.pid());
        }
    }
}

/// Events of a run, to show that it tests something.
#[derive(Debug, Default)]
struct Counts {
    client_kills: u64,
    agent_kills: u64,
    stops: usize,
    evicted: u64,
    reclaimed_bytes: u64,
    checks: usize,
}

struct Run {
    host: SoftHost,
    clients: Vec<Client>,
    random: Pcg64,
    counts: Counts,
}

impl Run {
    fn kills(&self) -> u64 {
        self.counts.client_kills + self.counts.agent_kills
    }

    /// Starts a client, unless the agent does not accept it, for example because it has not started yet.
    fn start_client(&mut self) {
        if let Ok(process) = SoftClient::start(&self.host.socket()) {
            self.clients.push(Client { process, is_stopped: false, replies_due: 0 });
        }
    }

    fn step(&mut self) {
        let Some(last) = self.clients.len().checked_sub(1) else { return self.start_client() };
        let chosen = self.random.random_range(0..=last);
        let pages = self.random.random_range(1..=PUSHED_VALUES_MAX);
        let client = &mut self.clients[chosen];
        match self.random.random_range(0..40) {
            0..6 if last + 1 < CLIENTS_MAX => self.start_client(),
            0..20 => client.send(&format!("push {pages}")),
            20..22 => client.send("give-back"),
            22..24 => {
                client.set_stopped(true);
                self.counts.stops += 1;
            }
            24..37 if client.is_stopped => client.set_stopped(false),
            24..37 => client.finish(),
            _ if self.random.random_range(0..KILLS_PER_AGENT_KILL) == 0 => {
                self.host.rack.kill_agent(0);
                self.host.rack.start_agent(0);
                self.counts.agent_kills += 1;
            }
            _ => {
                drop(self.clients.swap_remove(chosen));
                self.counts.client_kills += 1;
            }
        }
    }

    /// Returns the budgets that the clients report, by process ID.
    fn stats(&mut self) -> BTreeMap<u32, ClientStats> {
        self.clients.iter_mut().map(|client| (client.process.pid(), client.process.stats())).collect()
    }

    /// Lets all clients finish, and compares the record of the agent with their own budgets.
    async fn check_books(&mut self) {
        for client in &mut self.clients {
            client.set_stopped(false);
            client.finish();
        }
        for _ in 0..COMPARISONS_MAX {
            let before = self.stats();
            let report = self.host.next_report().await;
            let recorded: BTreeMap<u32, u64> =
                report.clients.iter().map(|client| (client.pid, client.budget_bytes)).collect();
            let budgets: BTreeMap<u32, u64> =
                before.iter().map(|(pid, stats)| (*pid, stats.budget * PAGE_BYTES)).collect();
            let sum: u64 = recorded.values().sum();
            assert!(report.total_bytes <= SIZE_MIB << 20 && sum + report.free_bytes == report.total_bytes);
            // A budget that changes meanwhile is no discrepancy. A revocation reduces the budget first, then the held
            // pages, and then the record of the agent.
            if recorded == budgets && before == self.stats() {
                assert!(before.values().all(|stats| stats.held <= stats.budget), "{before:?}");
                assert_eq!(report.client_count as usize, self.clients.len());
                self.counts.evicted += before.values().map(|stats| stats.evicted).sum::<u64>();
                self.counts.reclaimed_bytes += report.reclaimed_bytes;
                self.counts.checks += 1;
                return;
            }
        }
        let (budgets, report) = (self.stats(), self.host.next_report().await);
        panic!("after {:?}, the clients report {budgets:?}, and the agent {report:?}", self.counts);
    }
}

#[tokio::test]
async fn books_are_exact_after_random_kills_of_clients_and_agent() {
    let kills = number_from_env("TARN_SOFT_KILLS").unwrap_or(KILLS_DEFAULT);
    let host = SoftHost::start(SIZE_MIB).await;
    let random = Pcg64::seed_from_u64(seed());
    let mut run = Run { host, clients: Vec::new(), random, counts: Counts::default() };
    while run.kills() < kills {
        let next = (run.kills() + KILLS_PER_CHECK).min(kills);
        while run.kills() < next {
            run.step();
        }
        run.check_books().await;
    }
    println!("{:?}", run.counts);
    let Counts { client_kills, agent_kills, stops, evicted, reclaimed_bytes, .. } = run.counts;
    assert!(client_kills > 0 && agent_kills > 0 && stops > 0, "{:?}", run.counts);
    assert!(evicted > 0 && reclaimed_bytes > 0, "{:?}", run.counts);
    // The command and the metrics show the same record.
    let budgets: u64 = run.stats().values().map(|stats| stats.budget * PAGE_BYTES).sum();
    let output = run.host.rack.tarn(&["get", "soft", "h0", "-o", "json"]);
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    let shown_budgets = shown["clients"].as_array().unwrap().iter().map(|client| &client["budget_bytes"]);
    assert_eq!(shown_budgets.map(|bytes| bytes.as_u64().unwrap()).sum::<u64>(), budgets);
    assert_eq!(run.host.metric("budget_bytes"), budgets);
    assert_eq!(run.host.metric("free_bytes") + budgets, run.host.metric("total_bytes"));
    assert_eq!(run.host.metric("clients"), run.clients.len() as u64);
}

/// Returns the line of a process in the output of `tarn get soft`.
fn shown_line(host: &SoftHost, pid: u32) -> Option<String> {
    let output = host.rack.tarn(&["get", "soft", "h0"]);
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find(|line| line.split_whitespace().next() == Some(&pid.to_string())).map(str::to_owned)
}

#[tokio::test]
async fn client_that_is_stopped_during_a_reclamation_is_passed_over_and_shown() {
    const MIB_PAGES: u64 = 256;
    let host = SoftHost::start(SIZE_MIB).await;
    let start = || SoftClient::start(&host.socket()).unwrap();
    let (mut stopped, mut other, mut requester) = (start(), start(), start());
    // The weight of the first client is the largest.
    stopped.request("use 20000");
    assert_eq!((stopped.push(16 * MIB_PAGES), other.push(14 * MIB_PAGES)), (4096, 3584));
    let is_measured = async |_: &Rack| {
        let report = host.next_report().await;
        report.clients.iter().any(|client| client.footprint_bytes > 20_000 * PAGE_BYTES)
    };
    host.rack.wait_for("the measurement of the first client", is_measured).await;
    stopped.signal(Signal::STOP);
    assert_eq!(requester.push(10 * MIB_PAGES), 2560, "the other client gives its memory up");
    let has_state = async |state: &str| {
        let line = shown_line(&host, stopped.pid());
        line.is_some_and(|line| line.split_whitespace().last() == Some(state))
    };
    host.rack.wait_for("the stopped client to be shown", async |_| has_state("silent").await).await;
    assert_eq!(host.metric("silent_clients"), 1);
    assert!(host.metric("unanswered_demands_total") >= 1);
    assert!(host.next_report().await.clients.iter().all(|c| !c.silent || c.pid == stopped.pid()));
    let log = host.rack.read_log("h0");
    let lines = log.lines().filter(|line| line.contains("client of soft memory does not answer"));
    let pid = format!("pid={}", stopped.pid());
    assert_eq!(lines.map(|line| line.contains(&pid)).collect::<Vec<_>>(), [true], "{log}");
    stopped.signal(Signal::CONT);
    host.rack.wait_for("the continued client to be shown", async |_| has_state("ok").await).await;
    let gave_up = async |_: &Rack| {
        let report = host.next_report().await;
        report.clients.iter().any(|client| client.pid == stopped.pid() && client.reclaimed_bytes > 0)
    };
    host.rack.wait_for("the continued client to answer the demand", gave_up).await;
}

#[tokio::test]
async fn report_disappears_with_the_configuration() {
    let mut host = SoftHost::start(SIZE_MIB).await;
    assert!(host.rack.tarn(&["get", "soft", "h0"]).status.success());
    host.rack.kill_agent(0);
    host.rack.set_agent_toml_extra("");
    host.rack.start_agent(0);
    let is_gone = async |rack: &Rack| {
        let output = rack.tarn(&["get", "soft", "h0"]);
        !output.status.success()
            && String::from_utf8_lossy(&output.stderr).contains("has reported no soft memory")
    };
    host.rack.wait_for("the report to disappear", is_gone).await;
}

#[tokio::test]
async fn process_outside_the_pid_namespace_of_the_agent_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return report_skipped("soft memory across PID namespaces, which requires root");
    }
    let mut host = SoftHost::start(SIZE_MIB).await;
    // The agent sees the processes in namespaces below its own.
    let unshare = ["unshare", "--pid", "--fork", "--kill-child"];
    let mut inner = SoftClient::start_through(&unshare, &host.socket()).unwrap();
    assert_eq!(inner.push(100), 100);
    let report = host.next_report().await;
    assert_eq!((report.client_count, report.clients[0].program.as_str()), (1, "host-agent-test"));
    assert!(report.clients[0].used_bytes >= 100 * PAGE_BYTES, "its memory is measured");
    drop(inner);
    let is_free = async |_: &Rack| host.next_report().await.client_count == 0;
    host.rack.wait_for("the end of the inner client", is_free).await;
    host.rack.kill_agent(0);
    let [program, arguments @ ..] = unshare;
    host.rack.start_agent_through(0, Command::new(program).args(arguments).arg("--mount-proc"));
    host.next_report().await;
    let error = SoftClient::start(&host.socket()).unwrap_err();
    assert!(error.contains("reason: PidNamespace"), "{error}");
    assert_eq!(host.next_report().await.client_count, 0);
    let log = host.rack.read_log("h0");
    assert!(log.contains("client of soft memory of user 0") && log.contains("PID namespace"), "{log}");
}
