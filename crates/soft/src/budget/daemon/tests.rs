//! Tests of the daemon, and a simulation with clients that answer late or not at all, lie, lose their connection, or
//! are killed.

use std::collections::VecDeque;

use proptest::prelude::*;
use units::limits::SOFT_CLIENT_PAGES_MAX;

use super::*;

/// User of the clients.
const USER: UserId = UserId::ROOT;

/// Time after which the daemon grants pages.
const START: Ns = Ns::secs(2);

fn hello(budget: u64) -> ClientMessage {
    ClientMessage::Hello { version: VERSION, budget }
}

/// Creates a daemon that grants pages, with clients that hold all of their budgets and `traditional` other pages.
fn daemon(total: u64, clients: &[(u32, u64, u64)]) -> Daemon {
    let settings = Settings { over_reclaim_percent: 0, ..Settings::default() };
    let mut daemon = Daemon::new(settings, total, Ns::ZERO);
    for &(pid, budget, traditional) in clients {
        let pid = Pid(pid);
        daemon.connect(pid, USER, hello(budget), budget + traditional).unwrap();
        daemon.receive(pid, ClientMessage::Usage { held: budget }, START).unwrap();
        daemon.report_footprint(pid, budget + traditional);
    }
    daemon.take_outgoing();
    daemon
}

fn request(pages: u64) -> ClientMessage {
    ClientMessage::Request { pages, held: 0 }
}

fn outgoing(daemon: &mut Daemon) -> Vec<(u32, DaemonMessage)> {
    daemon.take_outgoing().into_iter().map(|outgoing| (outgoing.pid.0, outgoing.message)).collect()
}

fn granted(pages: u64) -> DaemonMessage {
    DaemonMessage::Granted { pages }
}

fn demand(demand: u64, pages: u64) -> DaemonMessage {
    DaemonMessage::Demand { demand, pages }
}

/// Lets a client give pages up and answer a demand.
fn answer(daemon: &mut Daemon, pid: u32, demand: u64, pages: u64, held: u64, now: Ns) {
    daemon.receive(Pid(pid), ClientMessage::Returned { pages, held }, now).unwrap();
    daemon.receive(Pid(pid), ClientMessage::Answered { demand, held }, now).unwrap();
}

/// The timeline of the paper's figure 2, in pages of 4 KiB: 10 MiB and 12 MiB of 20 MiB.
fn welcome(budget: u64) -> DaemonMessage {
    DaemonMessage::Welcome { budget, maximum: SOFT_CLIENT_PAGES_MAX }
}

#[test]
fn pages_move_from_the_cache_to_the_requester() {
    let mut daemon = daemon(5120, &[(10, 2560, 440), (11, 0, 0)]);
    daemon.receive(Pid(11), request(3072), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(10, demand(1, 512))]);
    answer(&mut daemon, 10, 1, 512, 2048, START);
    assert_eq!(outgoing(&mut daemon), [(11, granted(3072))]);
    let budgets = (daemon.ledger().budget(Pid(10)), daemon.ledger().budget(Pid(11)), daemon.ledger().free());
    assert_eq!(budgets, (2048, 3072, 0));
    let expected = Counters { requests: 1, granted: 3072, denied: 0, reclaimed: 512, unanswered: 0 };
    assert_eq!(daemon.counters(), expected);
}

#[test]
fn clients_of_an_earlier_daemon_keep_their_budgets_before_pages_are_granted() {
    let mut daemon = Daemon::new(Settings::default(), 100, Ns::ZERO);
    daemon.connect(Pid(1), USER, hello(0), 500).unwrap();
    daemon.receive(Pid(1), request(50), Ns::ms(1)).unwrap();
    daemon.connect(Pid(2), USER, hello(70), 80).unwrap();
    daemon.connect(Pid(3), USER, hello(70), 80).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, welcome(0)), (2, welcome(70)), (3, welcome(30))]);
    daemon.tick(Ns::ms(1999));
    assert_eq!(outgoing(&mut daemon), []);
    daemon.tick(Ns::ms(2000));
    // The third client has the largest weight: it has the most other memory.
    assert_eq!(outgoing(&mut daemon), [(3, demand(1, 30)), (2, demand(2, 33))]);
}

#[test]
fn silent_client_is_passed_over_and_does_not_block_other_requests() {
    let mut daemon = daemon(100, &[(1, 60, 500), (2, 40, 10), (3, 0, 0), (4, 0, 0)]);
    daemon.receive(Pid(3), request(30), START).unwrap();
    daemon.receive(Pid(4), request(10), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, demand(1, 30))]);
    let late = START.after(Ns::ms(500));
    daemon.tick(Ns(late.0 - 1));
    assert_eq!(outgoing(&mut daemon), []);
    daemon.tick(late);
    assert_eq!(outgoing(&mut daemon), [(2, demand(2, 30))]);
    assert!(daemon.clients().next().unwrap().is_silent);
    answer(&mut daemon, 2, 2, 30, 10, late);
    // The other request is smaller than the budget of the client that answers.
    assert_eq!(outgoing(&mut daemon), [(3, granted(30)), (2, demand(3, 10))]);
    answer(&mut daemon, 2, 3, 10, 0, late);
    assert_eq!(outgoing(&mut daemon), [(4, granted(10))]);
    // A late answer still counts.
    answer(&mut daemon, 1, 1, 30, 30, late);
    assert_eq!((daemon.ledger().free(), daemon.ledger().budget(Pid(1))), (30, 30));
    assert!(!daemon.clients().next().unwrap().is_silent);
    assert_eq!(daemon.counters().unanswered, 1);
}

#[test]
fn request_is_denied_if_clients_give_up_too_little() {
    let mut daemon = daemon(100, &[(1, 50, 50), (2, 50, 10), (3, 0, 0)]);
    daemon.receive(Pid(3), request(80), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, demand(1, 50)), (2, demand(2, 30))]);
    answer(&mut daemon, 1, 1, 0, 50, START);
    answer(&mut daemon, 2, 2, 30, 20, START);
    assert_eq!(outgoing(&mut daemon), [(3, granted(0))]);
    // Further requests of this size are denied without disturbing other clients, for a short time.
    daemon.receive(Pid(3), request(80), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(3, granted(0))]);
    daemon.receive(Pid(3), request(31), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(2, demand(3, 1))]);
    answer(&mut daemon, 2, 3, 1, 19, START);
    assert_eq!(outgoing(&mut daemon), [(3, granted(31))]);
}

#[test]
fn killed_client_gives_its_budget_back() {
    let mut daemon = daemon(100, &[(1, 60, 50), (2, 40, 10), (3, 0, 0)]);
    daemon.receive(Pid(3), request(50), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, demand(1, 50))]);
    daemon.disconnect(Pid(1), START);
    assert_eq!(outgoing(&mut daemon), [(3, granted(50))]);
    assert_eq!((daemon.ledger().free(), daemon.ledger().total()), (10, 100));
    // The requester is killed while it waits.
    daemon.receive(Pid(2), request(20), START).unwrap();
    daemon.disconnect(Pid(2), START);
    outgoing(&mut daemon);
    assert_eq!(daemon.ledger().free(), 50);
}

#[test]
fn client_without_connection_keeps_its_budget_for_a_time() {
    let mut daemon = daemon(100, &[(1, 60, 50), (2, 40, 10)]);
    daemon.connection_lost(Pid(1), START);
    daemon.receive(Pid(2), request(10), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(2, granted(0))]);
    daemon.connect(Pid(1), USER, hello(55), 110).unwrap();
    assert_eq!((daemon.ledger().budget(Pid(1)), daemon.ledger().free()), (55, 5));
    daemon.connection_lost(Pid(1), START);
    daemon.tick(START.after(Ns::ms(1999)));
    assert_eq!(daemon.ledger().free(), 5);
    daemon.tick(START.after(Ns::secs(2)));
    assert_eq!(daemon.ledger().free(), 60);
}

#[test]
fn invalid_messages_are_refused() {
    let mut daemon = daemon(100, &[(1, 0, 0)]);
    assert_eq!(daemon.connect(Pid(1), USER, hello(0), 0), Err(Refusal::AlreadyConnected));
    assert_eq!(daemon.connect(Pid(2), USER, request(1), 0), Err(Refusal::InvalidMessage));
    let old = ClientMessage::Hello { version: 0, budget: 0 };
    assert_eq!(daemon.connect(Pid(2), USER, old, 0), Err(Refusal::Version));
    let answered = ClientMessage::Answered { demand: 1, held: 0 };
    assert_eq!(daemon.receive(Pid(1), answered, START), Err(Refusal::InvalidMessage));
    assert_eq!(daemon.receive(Pid(1), hello(0), START), Err(Refusal::InvalidMessage));
    let mut starting = Daemon::new(Settings::default(), 100, Ns::ZERO);
    starting.connect(Pid(1), USER, hello(0), 0).unwrap();
    starting.receive(Pid(1), request(1), Ns::ZERO).unwrap();
    assert_eq!(starting.receive(Pid(1), request(1), Ns::ZERO), Err(Refusal::InvalidMessage));
}

#[test]
fn pages_that_were_granted_and_given_back_do_not_count_as_memory_in_use() {
    let mut daemon = daemon(100, &[(1, 40, 50)]);
    daemon.begin_measurement();
    for round in 1..=20 {
        let now = START.after(Ns::secs(round));
        daemon.receive(Pid(1), request(30), now).unwrap();
        daemon.receive(Pid(1), ClientMessage::Returned { pages: 30, held: 40 }, now).unwrap();
    }
    daemon.receive(Pid(1), request(5), START.after(Ns::secs(30))).unwrap();
    let footprint = |daemon: &Daemon| daemon.ledger().clients().next().unwrap().footprint;
    // Of the 605 granted pages, the client has 45 at most.
    assert_eq!(footprint(&daemon), 90 + 45);
    daemon.report_footprint(Pid(1), 50);
    assert_eq!(footprint(&daemon), 50 + 45);
}

#[test]
fn budget_of_a_client_is_limited() {
    let settings = Settings { client_pages_max: 30, ..Settings::default() };
    let mut daemon = Daemon::new(settings, 100, Ns::ZERO);
    daemon.connect(Pid(1), USER, hello(40), 100).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, DaemonMessage::Welcome { budget: 30, maximum: 30 })]);
    daemon.receive(Pid(1), request(1), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, granted(0))]);
    daemon.receive(Pid(1), ClientMessage::Returned { pages: 10, held: 20 }, START).unwrap();
    daemon.receive(Pid(1), request(10), START.after(Ns::secs(1))).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, granted(10))]);
}

#[test]
fn total_follows_the_memory_of_the_host() {
    let mut daemon = daemon(100, &[(1, 40, 50), (2, 30, 10)]);
    let adapt = |daemon: &mut Daemon, headroom| {
        daemon.adapt_to_host(HostMemory { limit: 100, headroom }, START);
        (daemon.ledger().total(), daemon.ledger().free())
    };
    assert_eq!(adapt(&mut daemon, 1000), (100, 30));
    assert_eq!(adapt(&mut daemon, 10), (80, 10));
    assert_eq!(adapt(&mut daemon, 0), (70, 0));
    assert_eq!(outgoing(&mut daemon), []);
    // The host lacks ten pages. They are not granted to other clients when they are returned.
    assert_eq!(adapt(&mut daemon, -10), (70, 0));
    assert_eq!(outgoing(&mut daemon), [(1, demand(1, 10))]);
    assert_eq!(adapt(&mut daemon, -10), (70, 0));
    assert_eq!(outgoing(&mut daemon), [], "these pages were demanded already");
    answer(&mut daemon, 1, 1, 10, 30, START);
    assert_eq!((daemon.ledger().total(), daemon.ledger().free()), (60, 0));
    // The memory suffices again.
    assert_eq!(adapt(&mut daemon, 500), (100, 40));
    // Slices are taken away.
    daemon.adapt_to_host(HostMemory { limit: 50, headroom: 500 }, START);
    assert_eq!(outgoing(&mut daemon), [(1, demand(2, 10))]);
}

#[test]
fn clients_keep_their_budgets_although_their_memory_is_not_available_to_a_new_daemon() {
    let mut daemon = Daemon::new(Settings::default(), 100, Ns::ZERO);
    daemon.adapt_to_host(HostMemory { limit: 100, headroom: 0 }, Ns::ms(1));
    daemon.connect(Pid(1), USER, hello(90), 200).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, welcome(90))]);
    daemon.receive(Pid(1), ClientMessage::Usage { held: 90 }, Ns::ms(2)).unwrap();
    daemon.adapt_to_host(HostMemory { limit: 100, headroom: 0 }, START);
    assert_eq!((daemon.ledger().total(), daemon.ledger().free()), (90, 0));
    assert_eq!(outgoing(&mut daemon), []);
}

#[test]
fn claimed_budget_is_bounded_by_the_memory_of_the_client() {
    let mut daemon = daemon(100, &[]);
    daemon.connect(Pid(1), USER, hello(u64::MAX), 7).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, welcome(7))]);
}

#[test]
fn silent_or_useless_clients_do_not_hide_a_shortage_of_memory() {
    let clients: Vec<(u32, u64, u64)> = (1..=4).map(|pid| (pid, 10, 1000)).chain([(5, 60, 5)]).collect();
    let mut daemon = daemon(100, &clients);
    let short = HostMemory { limit: 100, headroom: -8 };
    daemon.adapt_to_host(short, START);
    assert_eq!(outgoing(&mut daemon), [(1, demand(1, 8))]);
    // The heaviest client does not answer.
    let late = START.after(Ns::ms(500));
    daemon.tick(late);
    daemon.adapt_to_host(short, late);
    assert_eq!(outgoing(&mut daemon), [(2, demand(2, 8))]);
    // The others answer, and give nothing up.
    for (pid, number) in [(2, 2), (3, 3), (4, 4)] {
        daemon.receive(Pid(pid), ClientMessage::Answered { demand: number, held: 10 }, late).unwrap();
        daemon.adapt_to_host(short, late);
        assert_eq!(outgoing(&mut daemon), [(pid + 1, demand(number + 1, 8))]);
    }
    answer(&mut daemon, 5, 5, 8, 52, late);
    assert_eq!(daemon.ledger().total(), 92);
}

#[test]
fn unused_budget_does_not_hide_a_shortage_of_memory() {
    let mut daemon = daemon(100, &[(1, 50, 50), (2, 50, 0)]);
    daemon.receive(Pid(1), ClientMessage::Usage { held: 5 }, START).unwrap();
    daemon.adapt_to_host(HostMemory { limit: 100, headroom: -8 }, START);
    assert_eq!(outgoing(&mut daemon), [(1, demand(1, 50)), (2, demand(2, 3))]);
}

#[test]
fn measurement_does_not_contain_pages_that_were_granted_meanwhile() {
    let mut daemon = daemon(100, &[(1, 20, 5)]);
    daemon.begin_measurement();
    daemon.receive(Pid(1), ClientMessage::Request { pages: 30, held: 20 }, START).unwrap();
    daemon.report_footprint(Pid(1), 25);
    let sample = daemon.clients().next().unwrap().sample;
    assert_eq!((sample.used(), sample.footprint), (50, 55));
}

#[test]
fn claims_do_not_change_the_footprint() {
    let mut daemon = daemon(100, &[(1, 20, 5)]);
    for held in [0, 20, 0, u64::MAX, 10, 20] {
        daemon.receive(Pid(1), ClientMessage::Usage { held }, START).unwrap();
    }
    let sample = daemon.clients().next().unwrap().sample;
    assert_eq!((sample.used(), sample.footprint), (20, 25));
}

#[test]
fn granted_pages_do_not_increase_the_total_before_they_are_measured() {
    let mut daemon = daemon(1000, &[(1, 0, 0)]);
    let mut granted_pages = 0;
    let adapt = |daemon: &mut Daemon, headroom| {
        daemon.adapt_to_host(HostMemory { limit: 1000, headroom }, START);
        (daemon.ledger().total(), daemon.ledger().free())
    };
    assert_eq!(adapt(&mut daemon, 100), (100, 100));
    for _ in 0..20 {
        daemon.receive(Pid(1), ClientMessage::Request { pages: 10, held: granted_pages }, START).unwrap();
        granted_pages = daemon.ledger().budget(Pid(1));
        adapt(&mut daemon, 100);
    }
    assert_eq!((granted_pages, daemon.ledger().total()), (100, 100));
    // The client uses half of them: a half of the available memory remains.
    assert_eq!(adapt(&mut daemon, 50), (100, 0));
    daemon.begin_measurement();
    daemon.report_footprint(Pid(1), 50);
    assert_eq!(adapt(&mut daemon, 50), (100, 0));
    assert_eq!(adapt(&mut daemon, 60), (110, 10));
}

#[test]
fn pages_that_are_used_again_are_not_demanded_before_they_are_measured() {
    let mut daemon = daemon(100, &[(1, 60, 0)]);
    let measure = |daemon: &mut Daemon, pages| {
        daemon.begin_measurement();
        daemon.report_footprint(Pid(1), pages);
    };
    let adapt = |daemon: &mut Daemon, headroom| {
        daemon.adapt_to_host(HostMemory { limit: 100, headroom }, START);
        outgoing(daemon)
    };
    measure(&mut daemon, 20);
    assert_eq!(adapt(&mut daemon, 40), []);
    assert_eq!(adapt(&mut daemon, 0), [], "the client uses its budget");
    measure(&mut daemon, 60);
    assert_eq!(adapt(&mut daemon, 0), []);
    // The client uses less, and other programs use the memory.
    measure(&mut daemon, 20);
    assert_eq!(adapt(&mut daemon, 0), [(1, demand(1, 40))]);
}

#[test]
fn new_connection_does_not_end_the_time_of_a_client_without_demands() {
    let mut daemon = daemon(100, &[(1, 60, 500), (2, 40, 10), (3, 0, 0)]);
    daemon.receive(Pid(3), request(10), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, demand(1, 10))]);
    let lost = START.after(Ns::ms(490));
    daemon.connection_lost(Pid(1), lost);
    assert_eq!(outgoing(&mut daemon), [(2, demand(2, 10))]);
    assert_eq!(daemon.counters().unanswered, 1);
    daemon.connect(Pid(1), USER, hello(60), 560).unwrap();
    answer(&mut daemon, 2, 2, 10, 30, lost);
    daemon.receive(Pid(3), request(10), lost).unwrap();
    let welcome = welcome(60);
    assert_eq!(outgoing(&mut daemon), [(1, welcome), (3, granted(10)), (2, demand(3, 10))]);
    answer(&mut daemon, 2, 3, 10, 20, lost);
    // The client gives everything up, and connects again.
    daemon.receive(Pid(1), ClientMessage::Returned { pages: 60, held: 0 }, lost).unwrap();
    daemon.connection_lost(Pid(1), lost);
    daemon.connect(Pid(1), USER, hello(0), 500).unwrap();
    daemon.receive(Pid(1), request(60), lost).unwrap();
    daemon.take_outgoing();
    daemon.receive(Pid(3), request(10), Ns(lost.after(Ns::secs(5)).0 - 1)).unwrap();
    assert_eq!(outgoing(&mut daemon), [(2, demand(4, 10))]);
    answer(&mut daemon, 2, 4, 10, 10, lost.after(Ns::secs(5)));
    daemon.receive(Pid(3), request(10), lost.after(Ns::secs(5))).unwrap();
    assert_eq!(outgoing(&mut daemon), [(3, granted(10)), (1, demand(5, 10))]);
}

#[test]
fn client_that_gives_up_half_of_the_demanded_pages_is_not_passed_over() {
    let mut daemon = daemon(100, &[(1, 100, 500), (2, 0, 0)]);
    daemon.receive(Pid(2), request(41), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, demand(1, 41))]);
    answer(&mut daemon, 1, 1, 20, 80, START);
    assert_eq!(outgoing(&mut daemon), [(1, demand(2, 21))]);
    answer(&mut daemon, 1, 2, 9, 71, START);
    assert_eq!(outgoing(&mut daemon), [(2, granted(0))], "it gave up less than half");
}

/// Two clients that request more pages all the time, in turns. The first one has much more at the beginning, and gives
/// up slightly less than is demanded.
fn contend(client_pages_min: u64) -> (u64, u64) {
    let settings = Settings { client_pages_min, ..Settings::default() };
    let mut daemon = Daemon::new(settings, 1000, Ns::ZERO);
    for (pid, budget) in [(1, 1000), (2, 0)] {
        daemon.connect(Pid(pid), USER, hello(budget), budget + 100).unwrap();
    }
    daemon.take_outgoing();
    let mut now = START;
    for round in 0..400 {
        now = now.after(Ns::ms(60));
        let requester = Pid(1 + round % 2);
        let held = daemon.ledger().budget(requester);
        daemon.receive(requester, ClientMessage::Request { pages: 16, held }, now).unwrap();
        loop {
            let messages = daemon.take_outgoing();
            if messages.is_empty() {
                break;
            }
            for Outgoing { pid, message } in messages {
                if let DaemonMessage::Demand { demand, pages } = message {
                    let given = pages - pages.div_ceil(10);
                    let held = daemon.ledger().budget(pid) - given;
                    answer(&mut daemon, pid.0, demand, given, held, now);
                }
            }
        }
        daemon.begin_measurement();
        for pid in [1, 2].map(Pid) {
            let budget = daemon.ledger().budget(pid);
            daemon.report_footprint(pid, budget + 100);
        }
    }
    (daemon.ledger().budget(Pid(1)), daemon.ledger().budget(Pid(2)))
}

#[test]
fn client_keeps_its_minimum_while_another_requests_all_pages() {
    let (first, second) = contend(400);
    assert!(first >= 400 && second >= 400, "{first} and {second}");
    assert!(contend(0).1 < 400, "only the minimum keeps the pages of the second client");
}

#[test]
fn messages_of_a_lost_connection_are_ignored() {
    let mut daemon = daemon(100, &[(1, 60, 0), (2, 0, 0)]);
    daemon.receive(Pid(2), ClientMessage::Answered { demand: 7, held: 0 }, START).unwrap_err();
    for pid in [1, 2] {
        daemon.connection_lost(Pid(pid), START);
        for message in [ClientMessage::Returned { pages: 60, held: 0 }, request(10), hello(0)] {
            assert_eq!(daemon.receive(Pid(pid), message, START), Ok(()));
        }
    }
    assert_eq!(outgoing(&mut daemon), []);
    assert_eq!((daemon.ledger().budget(Pid(1)), daemon.ledger().free()), (60, 40));
}

#[test]
fn users_take_turns() {
    let mut daemon = Daemon::new(Settings::default(), 100, Ns::ZERO);
    let users = [(1, 7), (2, 7), (3, 7), (4, 8)];
    for (pid, uid) in users {
        daemon.connect(Pid(pid), UserId::new(uid).unwrap(), hello(0), 0).unwrap();
        daemon.receive(Pid(pid), request(1), Ns::ZERO).unwrap();
    }
    daemon.take_outgoing();
    // The request of the lost client does not delay others.
    daemon.connection_lost(Pid(1), Ns::ZERO);
    daemon.tick(START);
    let order = [(2, granted(1)), (4, granted(1)), (3, granted(1))];
    assert_eq!(outgoing(&mut daemon), order);
}

#[test]
fn smaller_request_after_a_denial_gets_the_free_pages() {
    let mut daemon = daemon(100, &[(1, 0, 0)]);
    daemon.receive(Pid(1), request(101), START).unwrap();
    daemon.receive(Pid(1), request(100), START).unwrap();
    assert_eq!(outgoing(&mut daemon), [(1, granted(0)), (1, granted(100))]);
}

/// Returns the user of a client of the simulation.
fn user_of(pid: Pid) -> UserId {
    UserId::new(pid.0 % 3).unwrap()
}

/// Client of the simulation.
#[derive(Clone, Debug)]
struct Simulated {
    pid: u32,
    /// Budget of the pool.
    budget: u64,
    held: u64,
    /// Budget that the daemon has recorded, as the client knows it.
    recorded: u64,
    is_requesting: bool,
    /// Messages that the daemon has not received yet.
    sent: VecDeque<ClientMessage>,
    /// Messages that the client has not received yet.
    received: VecDeque<DaemonMessage>,
    is_connected: bool,
    /// Stated budget of the connection that is not accepted yet.
    stated: Option<u64>,
}

#[derive(Clone, Debug)]
enum Event {
    Start,
    Request {
        client: prop::sample::Index,
        pages: u64,
    },
    Use {
        client: prop::sample::Index,
        percent: u64,
    },
    GiveBack {
        client: prop::sample::Index,
    },
    /// The client handles one message. It gives up this part of the demanded pages.
    Handle {
        client: prop::sample::Index,
        percent: u64,
    },
    /// The daemon handles one message of the client.
    Deliver {
        client: prop::sample::Index,
    },
    Kill {
        client: prop::sample::Index,
    },
    Disconnect {
        client: prop::sample::Index,
    },
    Reconnect {
        client: prop::sample::Index,
    },
    RestartDaemon,
    Wait {
        ms: u64,
    },
    Adapt {
        limit: u64,
        headroom: i64,
    },
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let client = any::<prop::sample::Index>;
    let percent = || prop_oneof![3 => Just(100), 1 => 0..100_u64];
    let event = prop_oneof![
        2 => Just(Event::Start),
        6 => (client(), 1..60_u64).prop_map(|(client, pages)| Event::Request { client, pages }),
        4 => (client(), percent()).prop_map(|(client, percent)| Event::Use { client, percent }),
        1 => client().prop_map(|client| Event::GiveBack { client }),
        12 => (client(), percent()).prop_map(|(client, percent)| Event::Handle { client, percent }),
        16 => client().prop_map(|client| Event::Deliver { client }),
        1 => client().prop_map(|client| Event::Kill { client }),
        1 => client().prop_map(|client| Event::Disconnect { client }),
        2 => client().prop_map(|client| Event::Reconnect { client }),
        1 => Just(Event::RestartDaemon),
        4 => (1..900_u64).prop_map(|ms| Event::Wait { ms }),
        2 => (0..150_u64, -40..100_i64).prop_map(|(limit, headroom)| Event::Adapt { limit, headroom }),
    ];
    prop::collection::vec(event, 0..400)
}

/// Daemon, its clients, and the messages between them.
struct World {
    daemon: Daemon,
    clients: Vec<Simulated>,
    last_pid: u32,
    now: Ns,
}

impl World {
    fn new() -> Self {
        let daemon = Daemon::new(Settings::default(), 100, Ns::ZERO);
        Self { daemon, clients: Vec::new(), last_pid: 0, now: Ns::ZERO }
    }

    fn pick(&mut self, index: &prop::sample::Index) -> Option<&mut Simulated> {
        let count = self.clients.len();
        if count == 0 { None } else { self.clients.get_mut(index.index(count)) }
    }

    fn run(&mut self, event: Event) {
        match event {
            Event::Start => {
                self.last_pid += 1;
                let mut client = Simulated {
                    pid: self.last_pid,
                    budget: 0,
                    held: 0,
                    recorded: 0,
                    is_requesting: false,
                    sent: VecDeque::new(),
                    received: VecDeque::new(),
                    is_connected: false,
                    stated: None,
                };
                client.connect();
                self.clients.push(client);
            }
            Event::Request { client, pages } => {
                if let Some(client) =
                    self.pick(&client).filter(|client| client.is_connected && !client.is_requesting)
                {
                    client.is_requesting = true;
                    client.sent.push_back(ClientMessage::Request { pages, held: client.held });
                }
            }
            Event::Use { client, percent } => {
                if let Some(client) = self.pick(&client) {
                    client.held = client.budget * percent / 100;
                    client.send(ClientMessage::Usage { held: client.held });
                    let (pid, held) = (Pid(client.pid), client.held);
                    self.daemon.report_footprint(pid, held + 10);
                }
            }
            Event::GiveBack { client } => {
                if let Some(client) = self.pick(&client) {
                    client.give_back(client.budget - client.held);
                }
            }
            Event::Handle { client, percent } => {
                if let Some(client) = self.pick(&client) {
                    client.handle(percent);
                }
            }
            Event::Deliver { client } => {
                if let Some(client) = self.pick(&client)
                    && let Some(message) = client.sent.pop_front()
                {
                    let pid = Pid(client.pid);
                    let result = match message {
                        ClientMessage::Hello { .. } => {
                            self.daemon.connect(pid, user_of(pid), message, u64::MAX)
                        }
                        _ => self.daemon.receive(pid, message, self.now),
                    };
                    result.expect("honest clients are not refused");
                }
            }
            Event::Kill { client } => {
                if let Some(pid) = self.pick(&client).map(|client| client.pid) {
                    self.clients.retain(|client| client.pid != pid);
                    self.daemon.disconnect(Pid(pid), self.now);
                }
            }
            Event::Disconnect { client } => {
                let now = self.now;
                if let Some(client) = self.pick(&client) {
                    client.lose_connection();
                    let pid = Pid(client.pid);
                    self.daemon.connection_lost(pid, now);
                }
            }
            Event::Reconnect { client } => {
                if let Some(client) = self.pick(&client).filter(|client| !client.is_connected) {
                    client.connect();
                }
            }
            Event::RestartDaemon => {
                self.clients.iter_mut().for_each(Simulated::lose_connection);
                self.daemon = Daemon::new(Settings::default(), 100, self.now);
                // All clients connect before the new daemon grants pages.
                self.clients.iter_mut().for_each(Simulated::connect);
                self.deliver_all();
            }
            Event::Wait { ms } => {
                self.now = self.now.after(Ns::ms(ms));
                // Clients without a connection connect again in time.
                self.clients.iter_mut().filter(|client| !client.is_connected).for_each(Simulated::connect);
                self.deliver_all();
                self.daemon.tick(self.now);
            }
            Event::Adapt { limit, headroom } => {
                self.daemon.adapt_to_host(HostMemory { limit, headroom }, self.now)
            }
        }
        for Outgoing { pid, message } in self.daemon.take_outgoing() {
            let client =
                self.clients.iter_mut().find(|client| client.pid == pid.0).expect("the client exists");
            client.received.push_back(message);
        }
    }

    fn deliver_all(&mut self) {
        for client in &mut self.clients {
            for message in client.sent.drain(..) {
                let result = match message {
                    ClientMessage::Hello { .. } => {
                        self.daemon.connect(Pid(client.pid), user_of(Pid(client.pid)), message, u64::MAX)
                    }
                    _ => self.daemon.receive(Pid(client.pid), message, self.now),
                };
                result.expect("honest clients are not refused");
            }
        }
    }

    /// Compares the record of the daemon with the clients and the messages on their way.
    fn check(&self) {
        let ledger = self.daemon.ledger();
        let budgets: u64 = ledger.clients().map(|client| client.budget).sum();
        assert_eq!(ledger.free() + budgets, ledger.total());
        for client in &self.clients {
            assert!(client.held <= client.budget && client.budget <= client.recorded);
            if client.sent.iter().any(|message| matches!(message, ClientMessage::Hello { .. }))
                || !client.is_connected
            {
                continue;
            }
            let granted = client.received.iter().map(|message| match message {
                DaemonMessage::Granted { pages } => *pages,
                _ => 0,
            });
            let returned = client.sent.iter().map(|message| match message {
                ClientMessage::Returned { pages, .. } => *pages,
                _ => 0,
            });
            let refused = client.received.iter().find_map(|message| match message {
                DaemonMessage::Welcome { budget, .. } => {
                    Some(client.stated.expect("a stated budget") - budget)
                }
                _ => None,
            });
            // A client can give back more than it keeps, before it knows it.
            let recorded = (client.recorded + returned.sum::<u64>()).saturating_sub(refused.unwrap_or(0));
            let expected = recorded + granted.sum::<u64>();
            assert_eq!(ledger.budget(Pid(client.pid)), expected, "{client:?}");
        }
    }
}

impl Simulated {
    fn send(&mut self, message: ClientMessage) {
        if self.is_connected {
            self.sent.push_back(message);
        }
    }

    fn connect(&mut self) {
        (self.is_connected, self.stated) = (true, Some(self.recorded));
        self.sent.push_back(hello(self.recorded));
    }

    fn lose_connection(&mut self) {
        (self.is_connected, self.is_requesting, self.stated) = (false, false, None);
        self.sent.clear();
        self.received.clear();
    }

    fn give_back(&mut self, pages: u64) {
        self.budget -= pages;
        self.held = self.held.min(self.budget);
        self.recorded -= pages;
        self.send(ClientMessage::Returned { pages, held: self.held });
    }

    fn handle(&mut self, percent: u64) {
        match self.received.pop_front() {
            None => {}
            Some(DaemonMessage::Welcome { budget, .. }) => {
                let refused = self.stated.take().expect("a stated budget") - budget;
                self.recorded = self.recorded.saturating_sub(refused);
                self.budget = self.budget.min(self.recorded);
                self.held = self.held.min(self.budget);
            }
            Some(DaemonMessage::Granted { pages }) => {
                self.recorded += pages;
                self.budget += pages;
                self.is_requesting = false;
            }
            Some(DaemonMessage::Demand { demand, pages }) => {
                self.give_back(self.budget.min(pages) * percent / 100);
                self.send(ClientMessage::Answered { demand, held: self.held });
            }
            Some(DaemonMessage::Refused(reason)) => panic!("an honest client is refused: {reason}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn record_is_exact_and_all_requests_are_answered(events in events()) {
        let mut world = World::new();
        for event in events {
            world.run(event);
            world.check();
        }
        // After the time for all decisions, each request has an answer, even if no client answers a demand.
        for _ in 0..200 {
            world.run(Event::Wait { ms: 500 });
            world.check();
        }
        for client in &world.clients {
            let is_answered = client.received.iter().any(|message| matches!(message, DaemonMessage::Granted { .. }));
            prop_assert!(!client.is_requesting || is_answered, "{:?}", client);
        }
    }
}

/// Client that claims anything, and answers demands or not.
#[derive(Clone, Debug)]
struct Liar {
    pid: Pid,
    /// Pages of its budget that it really uses.
    touched: u64,
    demand: Option<(u64, u64)>,
}

/// Pages of the host for soft memory.
const CAPACITY: u64 = 200;

/// Host with clients that claim anything.
struct LyingWorld {
    daemon: Daemon,
    clients: Vec<Liar>,
    now: Ns,
}

#[derive(Clone, Debug)]
enum Lie {
    Request {
        client: usize,
        pages: u64,
        held: u64,
    },
    Claim {
        client: usize,
        held: u64,
    },
    Touch {
        client: usize,
        percent: u64,
    },
    /// Gives back pages. The client uses at most the rest of its budget then.
    Return {
        client: usize,
        pages: u64,
    },
    /// Answers a demand with this part of the pages.
    Answer {
        client: usize,
        percent: u64,
    },
    Measure,
    Adapt,
    Wait {
        ms: u64,
    },
}

fn lies(are_pages_returned: bool) -> impl Strategy<Value = Vec<Lie>> {
    let client = || 0..3_usize;
    let held = || prop_oneof![Just(0), Just(u64::MAX), 0..300_u64];
    let returns = u32::from(are_pages_returned);
    let lie = prop_oneof![
        8 => (client(), 1..80_u64, held()).prop_map(|(client, pages, held)| Lie::Request { client, pages, held }),
        4 => (client(), held()).prop_map(|(client, held)| Lie::Claim { client, held }),
        4 => (client(), 0..=100_u64).prop_map(|(client, percent)| Lie::Touch { client, percent }),
        2 * returns => (client(), 0..80_u64).prop_map(|(client, pages)| Lie::Return { client, pages }),
        4 * returns => (client(), 0..=100_u64).prop_map(|(client, percent)| Lie::Answer { client, percent }),
        2 => Just(Lie::Measure),
        6 => Just(Lie::Adapt),
        2 => (1..900_u64).prop_map(|ms| Lie::Wait { ms }),
    ];
    prop::collection::vec(lie, 0..300)
}

impl LyingWorld {
    fn new() -> Self {
        let mut daemon = daemon(1000, &[]);
        let pids = [Pid(1), Pid(2), Pid(3)];
        pids.iter().for_each(|pid| daemon.connect(*pid, USER, hello(0), 0).unwrap());
        let clients = pids.map(|pid| Liar { pid, touched: 0, demand: None }).to_vec();
        let mut world = Self { daemon, clients, now: START };
        world.run(&Lie::Adapt);
        world
    }

    fn budgets(&self) -> u64 {
        self.daemon.ledger().total() - self.daemon.ledger().free()
    }

    fn give_back(&mut self, client: usize, pages: u64) {
        let client = &mut self.clients[client];
        let returned = pages.min(self.daemon.ledger().budget(client.pid));
        client.touched = client.touched.min(self.daemon.ledger().budget(client.pid) - returned);
        let held = client.touched;
        self.daemon.receive(client.pid, ClientMessage::Returned { pages: returned, held }, self.now).unwrap();
    }

    fn run(&mut self, lie: &Lie) {
        match *lie {
            Lie::Request { client, pages, held } => {
                // A second request before the answer is refused.
                self.daemon
                    .receive(self.clients[client].pid, ClientMessage::Request { pages, held }, self.now)
                    .ok();
            }
            Lie::Claim { client, held } => {
                self.daemon
                    .receive(self.clients[client].pid, ClientMessage::Usage { held }, self.now)
                    .unwrap();
            }
            Lie::Touch { client, percent } => {
                let client = &mut self.clients[client];
                client.touched = client.touched.max(self.daemon.ledger().budget(client.pid) * percent / 100);
            }
            Lie::Return { client, pages } => self.give_back(client, pages),
            Lie::Answer { client, percent } => {
                if let Some((demand, pages)) = self.clients[client].demand.take() {
                    self.give_back(client, pages * percent / 100);
                    let (pid, held) = (self.clients[client].pid, self.clients[client].touched);
                    self.daemon.receive(pid, ClientMessage::Answered { demand, held }, self.now).unwrap();
                }
            }
            Lie::Measure => {
                self.daemon.begin_measurement();
                self.clients
                    .iter()
                    .for_each(|client| self.daemon.report_footprint(client.pid, client.touched));
                self.adapt();
            }
            Lie::Adapt => self.adapt(),
            Lie::Wait { ms } => {
                self.now = self.now.after(Ns::ms(ms));
                self.daemon.tick(self.now);
            }
        }
        for Outgoing { pid, message } in self.daemon.take_outgoing() {
            if let DaemonMessage::Demand { demand, pages } = message {
                let client = self.clients.iter_mut().find(|client| client.pid == pid).unwrap();
                client.demand = Some((demand, pages));
            }
        }
    }

    fn adapt(&mut self) {
        let touched: u64 = self.clients.iter().map(|client| client.touched).sum();
        let headroom = CAPACITY.cast_signed() - touched.cast_signed();
        self.daemon.adapt_to_host(HostMemory { limit: 1000, headroom }, self.now);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn false_claims_raise_no_budgets_above_the_memory_of_the_host(lies in lies(false)) {
        let mut world = LyingWorld::new();
        for lie in &lies {
            world.run(lie);
            prop_assert!(world.budgets() <= CAPACITY, "{} after {:?}", world.budgets(), lie);
        }
    }

    /// Memory that clients have freed since the last measurement still counts as in use, and is available, too.
    #[test]
    fn freed_pages_count_twice_at_most_until_they_are_measured(lies in lies(true)) {
        let mut world = LyingWorld::new();
        let mut freed = 0;
        for lie in &lies {
            let touched: Vec<u64> = world.clients.iter().map(|client| client.touched).collect();
            world.run(lie);
            let after = world.clients.iter().map(|client| client.touched);
            freed += touched.iter().zip(after).map(|(before, after)| before.saturating_sub(after)).sum::<u64>();
            prop_assert!(world.budgets() <= CAPACITY + freed, "{} after {:?}", world.budgets(), lie);
        }
        // The excess comes down if the clients answer.
        for _ in 0..8 {
            world.run(&Lie::Measure);
            (0..3).for_each(|client| world.run(&Lie::Answer { client, percent: 100 }));
        }
        prop_assert!(world.budgets() <= CAPACITY, "{}", world.budgets());
    }
}
