//! The lives of slices, from the events that `tarn watch` prints: whose each was, one after the other.

use std::{collections::BTreeSet, fs, path::PathBuf};

use serde::Deserialize;

use super::{
    rack::Rack,
    scratch::Scratch,
    service::{Programs, Service, command},
};
use crate::failure::Failure;

/// Stations of a life that are shown; a longer one is cut at the end.
const STATIONS_MAX: usize = 8;

/// One line of the watch, if it is about a slice.
#[derive(Debug, Deserialize)]
struct Line {
    slice: Event,
}

#[derive(Debug, Deserialize)]
struct Event {
    slice: u32,
    state: String,
    host: Option<String>,
    vm: Option<String>,
}

/// A watch on every durable change.
#[derive(Debug)]
pub struct Lives {
    watch: Option<Service>,
    log: PathBuf,
}

impl Lives {
    /// Begins to watch.
    ///
    /// # Errors
    /// `tarn` does not start.
    pub fn watch(programs: &Programs, rack: &Rack, scratch: &Scratch) -> Result<Self, Failure> {
        let log = scratch.file("watch.jsonl");
        let mut command = command(&programs.tarn);
        command.args(["--endpoint", &rack.uri(), "--output", "json", "watch", "events"]);
        Ok(Self { watch: Some(Service::start(&mut command, log.clone())?), log })
    }

    /// Watches no more.
    pub fn stop(&mut self) {
        self.watch = None;
    }

    /// The life of a slice that had two hosts or more.
    pub fn of(&self, slice: u32) -> Option<String> {
        life(&fs::read_to_string(&self.log).ok()?, slice)
    }
}

/// In words, if it had two hosts or more. States between two that matter are left out.
fn life(log: &str, slice: u32) -> Option<String> {
    let events =
        log.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok().map(|line| line.slice));
    let mut stations: Vec<Station> =
        events.filter(|event| event.slice == slice).filter_map(station).collect();
    stations.dedup();
    let hosts: BTreeSet<&str> = stations.iter().filter_map(|station| station.host.as_deref()).collect();
    (hosts.len() > 1).then(|| {
        let shown: Vec<&str> =
            stations.iter().map(|station| station.words.as_str()).take(STATIONS_MAX).collect();
        let more = if stations.len() > STATIONS_MAX { " → …" } else { "" };
        format!("slice {slice}: {}{more}", shown.join(" → "))
    })
}

/// One part of a slice's life that is worth telling.
#[derive(Debug, PartialEq, Eq)]
struct Station {
    words: String,
    /// Whose it was, if it was a VM's.
    host: Option<String>,
}

fn station(event: Event) -> Option<Station> {
    let Event { state, host, vm, .. } = event;
    match (state.as_str(), host, vm) {
        ("online", Some(host), Some(vm)) => {
            Some(Station { words: format!("{vm} on {host}"), host: Some(host) })
        }
        ("scrubbing", Some(host), _) => Some(Station { words: format!("scrubbed by {host}"), host: None }),
        ("quarantined", ..) => Some(Station { words: "quarantined".to_owned(), host: None }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(slice: u32, state: &str, host: &str, vm: &str) -> String {
        format!(r#"{{"revision":1,"slice":{{"slice":{slice},"state":"{state}","host":{host},"vm":{vm}}}}}"#)
    }

    #[test]
    fn a_life_with_two_hosts_is_told_in_order() {
        let log = [
            event(7, "online", "\"h1\"", "\"a\""),
            event(8, "online", "\"h1\"", "\"b\""),
            r#"{"revision":2,"host":{"host":"h1"}}"#.to_owned(),
            event(7, "draining", "\"h1\"", "\"a\""),
            event(7, "scrubbing", "\"h2\"", "null"),
            event(7, "free", "null", "null"),
            event(7, "online", "\"h2\"", "\"c\""),
        ]
        .join("\n");
        assert_eq!(life(&log, 7).unwrap(), "slice 7: a on h1 → scrubbed by h2 → c on h2");
        assert_eq!(life(&log, 8), None);
    }
}
