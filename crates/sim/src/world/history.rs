//! Creates a store with a long history: as many ended reservations as one client may have.

use pool::record::{EndReason, Meta, Record, RequestKey, Reservation, Stage};
use units::limits::ENDED_REQUESTS_PER_CLIENT_MAX;
use units::{Bytes, HostId, Ns, RequestId, ReservationId, UnixMs};

use super::{World, fault_model::numbered_name};

/// Rack time at the start of a world with a long history.
const PAST_RACK_TIME: Ns = Ns::secs(3600);
/// Maximum number of attempts to write the history. An attempt fails if the store injects a fault.
const HISTORY_WRITE_ATTEMPTS_MAX: usize = 20;

impl World {
    /// Writes ended reservations up to the limit of one client. Gives up after [`HISTORY_WRITE_ATTEMPTS_MAX`]
    /// failed attempts.
    pub(super) fn write_long_history(&mut self) {
        let ended = u64::try_from(ENDED_REQUESTS_PER_CLIENT_MAX).expect("the limit fits u64");
        let meta = Meta {
            rack_time: PAST_RACK_TIME,
            next_reservation: ReservationId(ended + 1),
            ..Meta::new("rack".into())
        };
        let records = (1..=ended).map(|n| Record::Reservation(ReservationId(n), ended_reservation(n)));
        let records: Vec<Record> = std::iter::once(Record::Meta(meta)).chain(records).collect();
        // The first load opens the store. Both the load and the commit may fail.
        for _ in 0..HISTORY_WRITE_ATTEMPTS_MAX {
            if self.manager_process.store.load().is_some() && self.manager_process.store.commit(&records) {
                self.run_log.counts.long_histories += 1;
                return;
            }
        }
    }
}

fn ended_reservation(n: u64) -> Reservation {
    Reservation {
        vm: numbered_name("old", 0),
        host: HostId(0),
        slices: Vec::new(),
        local: Bytes::gib(1),
        cores: 1,
        pinned: false,
        request: RequestKey {
            client: numbered_name("c", 0),
            id: RequestId::new(&format!("past{n}")).expect("letters with a number are a valid request id"),
        },
        commit_within: Ns::secs(1),
        created: UnixMs(n),
        stage: Stage::Ended { at: Ns(n), why: EndReason::Deadline },
        uid: None,
        has_process: false,
        rehome: pool::record::Rehome::None,
    }
}
