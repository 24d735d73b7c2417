//! Conversion of the state of soft memory to the message for the manager.

use proto::v1 as wire;
use soft::budget::Weight;
use units::{Bytes, limits::SOFT_PROGRAM_BYTES_MAX, truncated};

use crate::soft_memory_report::{Client, Report};

/// Converts the state of soft memory to a message.
pub fn to_wire_soft_memory(report: Report) -> wire::SoftMemory {
    wire::SoftMemory {
        host: String::new(), // the manager uses the host of the session
        at_unix_ms: report.at.0,
        limit_bytes: report.limit.get(),
        total_bytes: report.total.get(),
        free_bytes: report.free.get(),
        granted_bytes: bytes(report.counters.granted),
        reclaimed_bytes: bytes(report.counters.reclaimed),
        denied_requests: report.counters.denied,
        unanswered_demands: report.counters.unanswered,
        client_count: u32::try_from(report.client_count).unwrap_or(u32::MAX),
        clients: report.clients.into_iter().map(to_wire_client).collect(),
    }
}

fn to_wire_client(client: Client) -> wire::SoftMemoryClient {
    let Client { user, program, state } = client;
    let (sample, counters) = (state.sample, state.counters);
    wire::SoftMemoryClient {
        pid: sample.pid.0,
        uid: user.get(),
        program: truncated(program, SOFT_PROGRAM_BYTES_MAX),
        budget_bytes: bytes(sample.budget),
        used_bytes: bytes(sample.used()),
        footprint_bytes: bytes(sample.footprint),
        weight_bytes: bytes(whole_pages(sample.weight())),
        granted_bytes: bytes(counters.granted),
        reclaimed_bytes: bytes(counters.reclaimed),
        denied_requests: counters.denied,
        unanswered_demands: counters.unanswered,
        silent: state.is_silent,
    }
}

/// Returns the number of bytes of pages of 4 KiB.
fn bytes(pages: u64) -> u64 {
    Bytes::pages(pages).get()
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 2^41 pages")]
fn whole_pages(weight: Weight) -> u64 {
    weight.pages().round() as u64
}

#[cfg(test)]
mod tests {
    use soft::budget::{ClientReport, ClientSample, Counters, Pid};
    use units::{UnixMs, UserId};

    use super::*;

    #[test]
    fn pages_are_converted_to_bytes_and_program_names_are_bounded() {
        // 1024 pages of soft memory and 2048 of traditional memory have a weight of 2730.67 pages.
        let sample = ClientSample { pid: Pid(812), budget: 1536, claimed_used: 1024, footprint: 3072 };
        let counters = Counters { requests: 9, granted: 2048, denied: 3, reclaimed: 512, unanswered: 1 };
        let client = Client {
            user: UserId::new(2001).unwrap(),
            program: "é".repeat(30),
            state: ClientReport { sample, counters, is_silent: true },
        };
        let message = to_wire_soft_memory(Report {
            at: UnixMs(7),
            limit: Bytes::gib(2),
            total: Bytes::gib(1),
            free: Bytes::mib(4),
            counters: Counters { requests: 9, granted: 4096, denied: 5, reclaimed: 1 << 62, unanswered: 2 },
            client_count: 300,
            clients: vec![client],
        });
        let expected = wire::SoftMemoryClient {
            pid: 812,
            uid: 2001,
            program: "é".repeat(22),
            budget_bytes: 6 << 20,
            used_bytes: 4 << 20,
            footprint_bytes: 12 << 20,
            weight_bytes: 2731 << 12,
            granted_bytes: 8 << 20,
            reclaimed_bytes: 2 << 20,
            denied_requests: 3,
            unanswered_demands: 1,
            silent: true,
        };
        let expected = wire::SoftMemory {
            host: String::new(),
            at_unix_ms: 7,
            limit_bytes: 2 << 30,
            total_bytes: 1 << 30,
            free_bytes: 4 << 20,
            granted_bytes: 16 << 20,
            reclaimed_bytes: u64::MAX,
            denied_requests: 5,
            unanswered_demands: 2,
            client_count: 300,
            clients: vec![expected],
        };
        assert_eq!(message, expected);
    }

    #[test]
    fn claims_above_the_budget_and_the_footprint_are_not_reported_as_used() {
        let used_bytes = |budget, footprint| {
            let sample = ClientSample { pid: Pid(1), budget, claimed_used: 9000, footprint };
            let state = ClientReport { sample, counters: Counters::default(), is_silent: false };
            to_wire_client(Client { user: UserId::ROOT, program: "cache".to_owned(), state }).used_bytes
        };
        assert_eq!([used_bytes(256, 1024), used_bytes(1024, 512)], [1 << 20, 2 << 20]);
    }
}
