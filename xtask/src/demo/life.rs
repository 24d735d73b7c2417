//! History of slices from the events of `tarn watch`: their owners in order.

use std::{fs, path::PathBuf};

use serde::Deserialize;

use super::{
    rack::Rack,
    scratch::Scratch,
    service::{Programs, Service, command},
};
use crate::failure::Failure;

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

    /// Returns the history of a slice after a host had it: from its last VM there to its next one
    /// elsewhere, if any.
    pub fn after(&self, host: &str, slice: u32) -> Option<String> {
        life(&fs::read_to_string(&self.log).ok()?, host, slice)
    }
}

fn life(log: &str, host: &str, slice: u32) -> Option<String> {
    let events =
        log.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok().map(|line| line.slice));
    let mut stations: Vec<Station> =
        events.filter(|event| event.slice == slice).filter_map(station).collect();
    stations.dedup();
    let from = stations.iter().rposition(|station| station.host.as_deref() == Some(host))?;
    let next = stations[from + 1..].iter().position(|station| station.host.is_some())?;
    let told: Vec<&str> =
        stations[from..=from + 1 + next].iter().map(|station| station.words.as_str()).collect();
    Some(format!("slice {slice}: {}", told.join(" → ")))
}

/// Entry of a slice's history.
#[derive(Debug, PartialEq, Eq)]
struct Station {
    words: String,
    /// VM, if a VM owned it.
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
    fn a_slice_is_followed_from_the_lost_host_to_its_next_vm() {
        let log = [
            event(7, "online", "\"h0\"", "\"z\""),
            event(7, "online", "\"h1\"", "\"a\""),
            event(8, "online", "\"h1\"", "\"b\""),
            r#"{"revision":2,"host":{"host":"h1"}}"#.to_owned(),
            event(7, "draining", "\"h1\"", "\"a\""),
            event(7, "scrubbing", "\"h2\"", "null"),
            event(7, "free", "null", "null"),
            event(7, "online", "\"h2\"", "\"c\""),
            event(7, "online", "\"h3\"", "\"d\""),
        ]
        .join("\n");
        assert_eq!(life(&log, "h1", 7).unwrap(), "slice 7: a on h1 → scrubbed by h2 → c on h2");
        assert_eq!(life(&log, "h1", 8), None);
    }
}
