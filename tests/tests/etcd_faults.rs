//! Tests of the store in etcd with a simulated server that loses, delays and repeats calls. `TARN_SEEDS` sets the number of
//! seeds.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use pool_manager::store::{
    Store as _, StoreError,
    etcd::{Cluster, EtcdStore},
};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use tests::{
    environment::number_from_env,
    simulated_etcd::{FaultCounts, SimulatedEtcd},
    store_in_etcd::{Entries, apply, connect, elect, entries, open, random_batch, reopen},
};

/// Number of seeds if `TARN_SEEDS` is not set.
const SEED_COUNT_DEFAULT: u64 = 24;
/// Number of threads. A seed mostly waits, because calls are repeated after a delay.
const THREAD_COUNT: u64 = 8;
/// Number of steps of a seed.
const STEP_COUNT: u32 = 40;
/// Fraction of faulty calls.
const FAULT_RATE: f64 = 0.15;
/// Time to live of a lease. Leases do not end by themselves.
const TTL: Duration = Duration::from_secs(2);

/// Leader with the entries that its store must have.
struct Run {
    etcd: SimulatedEtcd,
    random: Pcg64,
    cluster: Cluster,
    store: EtcdStore,
    expected: Entries,
    /// Leaders before this one, which do not know that another one was elected.
    former: Vec<EtcdStore>,
}

/// Events of a seed, to show that it tests something.
#[derive(Debug)]
struct Counts {
    faults: FaultCounts,
    elections: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let etcd = SimulatedEtcd::start(seed, FAULT_RATE);
        let cluster = connect(vec![etcd.endpoint()], "/tarn/rack");
        let (store, _) = open(&cluster, TTL);
        let random = Pcg64::seed_from_u64(seed);
        let (expected, former) = (Entries::new(), Vec::new());
        Self { etcd, random, cluster, store, expected, former }
    }

    fn step(&mut self) {
        match self.random.random_range(0..20) {
            0 => self.elect_another(),
            1..4 => self.reopen(),
            4..7 => self.write_as_former_leader(),
            _ => self.write(),
        }
    }

    fn write(&mut self) {
        let batch = random_batch(&mut self.random);
        let mut written = self.expected.clone();
        apply(&mut written, &batch);
        if self.store.commit(&batch).is_ok() {
            self.expected = written;
            return;
        }
        let found = reopen(&mut self.store);
        assert!(found == self.expected || found == written, "an uncertain batch is applied in part");
        self.expected = found;
    }

    fn reopen(&mut self) {
        assert!(reopen(&mut self.store) == self.expected, "the store has lost or changed entries");
    }

    /// Ends the lease of the leader, and opens the store as another one.
    fn elect_another(&mut self) {
        self.etcd.end_leases();
        let leadership = elect(&self.cluster, TTL);
        let store = loop {
            match EtcdStore::open(self.cluster.clone(), &leadership) {
                Ok(store) => break store,
                Err(error) => assert!(matches!(error, StoreError::Etcd { .. }), "{error}"),
            }
        };
        self.former.push(std::mem::replace(&mut self.store, store));
        self.reopen();
    }

    /// Writes as a former leader, whose write must fail, and change nothing.
    fn write_as_former_leader(&mut self) {
        let Some(last) = self.former.len().checked_sub(1) else { return };
        let chosen = self.random.random_range(0..=last);
        let batch = random_batch(&mut self.random);
        let former = &mut self.former[chosen];
        assert!(former.commit(&batch).is_err(), "a former leader has written");
        let reopened = former.reopen();
        let is_rejected = matches!(reopened, Err(StoreError::NotLeader { .. } | StoreError::Etcd { .. }));
        assert!(is_rejected, "a former leader has opened the store: {reopened:?}");
    }
}

fn run(seed: u64) -> Counts {
    println!("seed {seed} starts");
    let mut run = Run::new(seed);
    (0..STEP_COUNT).for_each(|_| run.step());
    assert!(entries_until_readable(&run.store) == run.expected, "seed {seed}");
    Counts { faults: run.etcd.faults(), elections: run.former.len() as u64 }
}

/// Returns the entries of a snapshot, without reopening the store.
fn entries_until_readable(store: &EtcdStore) -> Entries {
    loop {
        if let Ok(mut snapshot) = store.snapshot() {
            return entries(snapshot.as_mut());
        }
    }
}

#[test]
fn acknowledged_batches_survive_lost_late_and_repeated_calls() {
    let seeds = number_from_env("TARN_SEEDS").unwrap_or(SEED_COUNT_DEFAULT);
    let next = AtomicU64::new(0);
    let run_seeds = || {
        let mut counts = Vec::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds {
                return counts;
            }
            counts.push(run(seed));
        }
    };
    let counts: Vec<Counts> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREAD_COUNT).map(|_| scope.spawn(run_seeds)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no seed fails")).collect()
    });
    let sum = |count: fn(&Counts) -> u64| counts.iter().map(count).sum::<u64>();
    let (lost_calls, lost_answers) = (sum(|of| of.faults.lost_calls), sum(|of| of.faults.lost_answers));
    let (late_calls, elections) = (sum(|of| of.faults.late_calls), sum(|of| of.elections));
    println!(
        "{lost_calls} lost calls, {lost_answers} lost answers, {late_calls} late calls, {elections} elections"
    );
    assert!(lost_calls > 0 && lost_answers > 0 && late_calls > 0 && elections > 0);
}
