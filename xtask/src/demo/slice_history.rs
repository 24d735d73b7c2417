//! History of slices, read from the events of `tarn watch`: the owners of a slice in order.

use std::{fs, path::PathBuf};

use serde::Deserialize;

use super::{
    rack::Rack,
    scratch::ScratchFolders,
    service::{self, Programs, new_command},
};
use crate::failure::Failure;
use local_rack::Process;

/// Output line of `tarn watch` about a slice.
#[derive(Debug, Deserialize)]
struct SliceLogLine {
    slice: SliceEvent,
}

#[derive(Debug, Deserialize)]
struct SliceEvent {
    slice: u32,
    state: String,
    host: Option<String>,
    vm: Option<String>,
}

/// Running process of `tarn watch`, which writes all durable changes to a log.
#[derive(Debug)]
pub struct SliceWatch {
    watch: Option<Process>,
    log: PathBuf,
}

impl SliceWatch {
    /// Starts `tarn watch`.
    ///
    /// # Errors
    /// Returns an error if `tarn` does not start.
    pub fn start(programs: &Programs, rack: &Rack, scratch: &ScratchFolders) -> Result<Self, Failure> {
        let log = scratch.file("watch.jsonl");
        let mut command = new_command(&programs.tarn);
        command.args(["--endpoint", &rack.uri(), "--output", "json", "watch", "events"]);
        Ok(Self { watch: Some(service::start("tarn watch", &mut command, log.clone())?), log })
    }

    /// Kills `tarn watch`. Its log remains.
    pub fn stop(&mut self) {
        self.watch = None;
    }

    /// Returns the history of a slice from its last VM on this host to the next VM that owns the
    /// slice. Returns `None` if there are no such VMs.
    pub fn history_after(&self, host: &str, slice: u32) -> Option<String> {
        format_history(&fs::read_to_string(&self.log).ok()?, host, slice)
    }
}

fn format_history(log: &str, host: &str, slice: u32) -> Option<String> {
    let events =
        log.lines().filter_map(|line| serde_json::from_str::<SliceLogLine>(line).ok().map(|line| line.slice));
    let mut entries: Vec<HistoryEntry> =
        events.filter(|event| event.slice == slice).filter_map(to_history_entry).collect();
    entries.dedup();
    let from = entries.iter().rposition(|entry| entry.host.as_deref() == Some(host))?;
    let length = entries[from + 1..].iter().position(|entry| entry.host.is_some())?;
    let steps: Vec<&str> =
        entries[from..=from + 1 + length].iter().map(|entry| entry.text.as_str()).collect();
    Some(format!("slice {slice}: {}", steps.join(" → ")))
}

/// Entry in the history of a slice.
#[derive(Debug, PartialEq, Eq)]
struct HistoryEntry {
    text: String,
    /// Host of the VM that owned the slice. `None` if no VM owned the slice.
    host: Option<String>,
}

fn to_history_entry(event: SliceEvent) -> Option<HistoryEntry> {
    let SliceEvent { state, host, vm, .. } = event;
    match (state.as_str(), host, vm) {
        ("online", Some(host), Some(vm)) => {
            Some(HistoryEntry { text: format!("{vm} on {host}"), host: Some(host) })
        }
        ("scrubbing", Some(host), _) => {
            Some(HistoryEntry { text: format!("scrubbed by {host}"), host: None })
        }
        ("quarantined", ..) => Some(HistoryEntry { text: "quarantined".to_owned(), host: None }),
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
    fn history_contains_steps_from_lost_host_to_next_vm() {
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
        assert_eq!(format_history(&log, "h1", 7).unwrap(), "slice 7: a on h1 → scrubbed by h2 → c on h2");
        assert_eq!(format_history(&log, "h1", 8), None);
    }
}
