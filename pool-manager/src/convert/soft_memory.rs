//! Validates the state of soft memory as reported by agents. The manager only displays reports. It stores them
//! unchanged, except for the names of programs, which any process of the host can choose.

use std::collections::BTreeSet;

use proto::v1 as wire;
use units::{
    Name, UserId,
    limits::{SOFT_PROGRAM_BYTES_MAX, SOFT_REPORTED_CLIENTS_MAX},
    single_line,
};

use super::{reports::check_text_size, requests::InvalidField};

/// Validated report of the soft memory of a host.
#[derive(Clone, Debug, PartialEq)]
pub struct SoftMemoryReport(wire::SoftMemory);

impl SoftMemoryReport {
    /// Returns the message for clients.
    pub fn into_message(self) -> wire::SoftMemory {
        self.0
    }
}

/// Validates an agent's report. The report's host is replaced by `host`, the host of the session. Control
/// characters in names of programs are replaced by spaces.
///
/// # Errors
/// [`InvalidField`] with the first field that violates a rule.
pub fn parse_soft_memory_report(
    host: &Name,
    mut report: wire::SoftMemory,
) -> Result<SoftMemoryReport, InvalidField> {
    let count = report.clients.len();
    if count > SOFT_REPORTED_CLIENTS_MAX {
        let rule = format!("must be at most {SOFT_REPORTED_CLIENTS_MAX}");
        return Err(InvalidField::new("soft_memory.clients", count, rule));
    }
    if (report.client_count as usize) < count {
        let rule = format!("must be at least {count}, the number of clients in the report");
        return Err(InvalidField::new("soft_memory.client_count", report.client_count, rule));
    }
    let mut pids = BTreeSet::new();
    for client in &mut report.clients {
        let pid = client.pid;
        if !pids.insert(pid) {
            let rule = "is a duplicate: each client must appear once";
            return Err(InvalidField::new("soft_memory.clients.pid", pid, rule));
        }
        check_client(client).map_err(|InvalidField { field, problem }| InvalidField {
            field,
            problem: format!("{problem} (of process {pid})"),
        })?;
        client.program = single_line(&client.program, SOFT_PROGRAM_BYTES_MAX);
    }
    report.host = host.to_string();
    Ok(SoftMemoryReport(report))
}

fn check_client(client: &wire::SoftMemoryClient) -> Result<(), InvalidField> {
    UserId::new(client.uid)
        .map_err(|error| InvalidField { field: "soft_memory.clients.uid", problem: error.to_string() })?;
    check_text_size("soft_memory.clients.program", &client.program, SOFT_PROGRAM_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(clients: Vec<wire::SoftMemoryClient>) -> wire::SoftMemory {
        let client_count = u32::try_from(clients.len()).unwrap();
        wire::SoftMemory { host: "other".to_owned(), client_count, clients, ..wire::SoftMemory::default() }
    }

    /// Returns a client with the largest numbers.
    fn client(pid: u32, program: &str) -> wire::SoftMemoryClient {
        wire::SoftMemoryClient {
            pid,
            uid: 4_294_967_294,
            program: program.to_owned(),
            budget_bytes: u64::MAX,
            weight_bytes: u64::MAX,
            denied_requests: u64::MAX,
            silent: true,
            ..wire::SoftMemoryClient::default()
        }
    }

    #[test]
    fn host_of_the_session_replaces_the_reported_host() {
        let host = Name::new("h0").unwrap();
        let sent = wire::SoftMemory { client_count: 9, ..report(vec![client(5, "cache"), client(7, "")]) };
        let parsed = parse_soft_memory_report(&host, sent).unwrap().into_message();
        let expected = wire::SoftMemory {
            host: "h0".to_owned(),
            client_count: 9,
            clients: vec![client(5, "cache"), client(7, "")],
            ..wire::SoftMemory::default()
        };
        assert_eq!(parsed, expected);
    }

    #[test]
    fn control_characters_in_program_names_become_spaces() {
        let host = Name::new("h0").unwrap();
        let sent = report(vec![client(5, "a\nok\u{1b}[2J\u{202e}b")]);
        let parsed = parse_soft_memory_report(&host, sent).unwrap().into_message();
        assert_eq!(parsed.clients[0].program, "a ok [2J b");
    }

    #[test]
    fn invalid_report_is_an_error_with_field_value_and_rule() {
        let host = Name::new("h0").unwrap();
        let many = (0..257).map(|pid| client(pid, "cache")).collect();
        let no_user = wire::SoftMemoryClient { uid: u32::MAX, ..client(5, "cache") };
        let too_few = wire::SoftMemory { client_count: 1, ..report(vec![client(5, ""), client(6, "")]) };
        for (report, message) in [
            (report(many), "soft_memory.clients: 257 must be at most 256"),
            (too_few, "soft_memory.client_count: 1 must be at least 2, the number of clients in the report"),
            (
                report(vec![client(5, "a"), client(5, "b")]),
                "soft_memory.clients.pid: 5 is a duplicate: each client must appear once",
            ),
            (
                report(vec![no_user]),
                "soft_memory.clients.uid: 4294967295 is not a user id: must be at most 4294967294 (of process 5)",
            ),
            (
                report(vec![client(5, &"x".repeat(46))]),
                "soft_memory.clients.program: 46 bytes must have at most 45 bytes (of process 5)",
            ),
        ] {
            assert_eq!(parse_soft_memory_report(&host, report).unwrap_err().to_string(), message);
        }
    }
}
