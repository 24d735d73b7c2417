//! The life of a guest as others see it and order it at its control socket, with guests of a few instructions on any /dev/kvm.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use std::{
    io::{Read as _, Write as _},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tests::{
    place::{Place, SMALL},
    small_guests::{self as code, can_run},
};

/// How long anything here may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Guest that prints repeatedly.
struct Guest<'a> {
    place: &'a Place,
    process: Child,
}

impl<'a> Guest<'a> {
    fn start(place: &'a Place, kernel: &[u8], options: &[&str]) -> Self {
        let process = place.command(kernel, options).stderr(Stdio::piped()).spawn().unwrap();
        let mut guest = Self { place, process };
        guest.goes_on();
        guest
    }

    fn touching(place: &'a Place) -> Self {
        Self::start(place, &code::touch(), &["--memory", "size=64MiB", "--pool", "size=1GiB"])
    }

    /// Waits for further output.
    fn goes_on(&mut self) {
        let (before, begun) = (self.place.console().len(), Instant::now());
        while self.place.console().len() < before + 3 {
            assert!(begun.elapsed() < PATIENCE, "it says nothing more");
            assert_eq!(self.process.try_wait().unwrap(), None, "it is over");
            std::thread::yield_now();
        }
    }

    fn terminate(&self) {
        kill_process(Pid::from_child(&self.process), Signal::TERM).unwrap();
    }

    /// Returns its exit status and the VMM's output; it is not running any more.
    fn end(mut self) -> (Option<i32>, String) {
        let (mut said, ended) = (String::new(), self.process.wait().unwrap());
        self.process.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        self.place.assert_not_running();
        (ended.code(), said)
    }
}

/// A test that fails leaves no guest behind.
impl Drop for Guest<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn done(output: Output) {
    assert_eq!((output.status.code(), said(&output).as_str()), (Some(0), ""));
}

fn refused(output: &Output, code: i32, expected: &str) {
    assert_eq!(output.status.code(), Some(code), "{}", said(output));
    assert!(said(output).contains(expected), "{}", said(output));
}

/// Guest that writes its pool memory on request.
struct Typist {
    process: Child,
    keys: ChildStdin,
    screen: ChildStdout,
}

impl Typist {
    fn start(place: &Place) -> Self {
        let options = ["--memory", "size=64MiB", "--pool", "size=1GiB", "--serial", "tty"];
        let mut command = place.command(&code::write_when_typed(), &options);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (keys, screen) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Self { process, keys, screen }
    }

    /// Returns when the guest has written.
    fn writes(&mut self) {
        self.keys.write_all(b"x").unwrap();
        self.screen.read_exact(&mut [0]).unwrap();
    }
}

impl Drop for Typist {
    fn drop(&mut self) {
        let _ = self.process.kill(); // both fail only if it has ended
        let _ = self.process.wait();
    }
}

#[test]
fn info_tells_of_each_node_and_how_much_of_it_the_guest_has_touched() {
    if !can_run() {
        return;
    }
    const MIB: u64 = 1 << 20;
    let place = Place::new();
    let mut guest = Typist::start(&place);
    guest.writes();
    let first = place.info();
    guest.writes();
    let second = place.info();
    let touched = |told: &serde_json::Value| told["nodes"][1]["touched_bytes"].as_u64().unwrap();
    assert_eq!((touched(&first), touched(&second)), (MIB, 2 * MIB));
    assert_eq!(second["pid"], guest.process.id());
    let fixed = |key: &str| second["nodes"][1][key].clone();
    assert_eq!((fixed("kind"), fixed("bytes")), ("pool".into(), (1 << 30).into()));
    assert_eq!((second["state"].clone(), second["agent"].clone()), ("running".into(), ().into()));
    let told = place.ask(&["info", "v"]);
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(told.contains("1     pool   -     1GiB    2MiB"), "{told}");
    done(place.ask(&["stop", "v", "--force"]));
    assert_eq!(guest.process.wait().unwrap().code(), Some(12));
    place.assert_not_running();
}

#[test]
fn a_paused_guest_stands_still_and_goes_on_when_it_is_resumed() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut guest =
        Guest::start(&place, &code::touch(), &["--cpus=4", "--memory=size=64MiB", "--pool=size=1GiB"]);
    for _ in 0..20 {
        done(place.ask(&["pause", "v"]));
        let stood_at = place.console().len();
        done(place.ask(&["pause", "v"]));
        assert_eq!(place.info()["state"], "paused");
        assert_eq!(place.console().len(), stood_at);
        done(place.ask(&["resume", "v"]));
        done(place.ask(&["resume", "v"]));
        assert_eq!(place.info()["state"], "running");
        guest.goes_on();
    }
    done(place.ask(&["pause", "v"]));
    done(place.ask(&["stop", "v", "--force"]));
    assert_eq!(guest.end(), (Some(12), "the guest was stopped at once on request\n".into()));
}

#[test]
fn stop_presses_the_power_button_and_returns_when_the_guest_is_gone() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let guest = Guest::start(&place, &code::obey(), &SMALL);
    done(place.ask(&["stop", "v"]));
    place.assert_not_running();
    assert_eq!(guest.end(), (Some(0), String::new()));
}

#[test]
fn a_paused_guest_sees_its_power_button() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let paused = || {
        let guest = Guest::start(&place, &code::obey(), &SMALL);
        done(place.ask(&["pause", "v"]));
        guest
    };
    let guest = paused();
    done(place.ask(&["stop", "v"]));
    assert_eq!(guest.end(), (Some(0), String::new()));
    let guest = paused();
    guest.terminate();
    assert_eq!(guest.end(), (Some(0), String::new()));
}

#[test]
fn a_guest_that_does_not_listen_is_ending_and_not_paused_until_it_is_stopped() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let guest = Guest::touching(&place);
    refused(
        &place.ask(&["stop", "v", "--timeout", "10ms"]),
        124,
        "VM v has not ended after 10ms; use --force to stop it at once",
    );
    assert_eq!(place.info()["state"], "stopping");
    refused(&place.ask(&["pause", "v"]), 4, "VM v: the guest is powering off");
    done(place.ask(&["stop", "v", "--force"]));
    assert_eq!(guest.end().0, Some(12));
}

#[test]
fn a_vm_runs_once() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut guest = Guest::touching(&place);
    let again = place.run(&code::hello(), &["--memory", "size=64MiB", "--serial", "null"]);
    let running = format!("error: VM v is already running: process {} listens on ", guest.process.id());
    refused(&again, 1, &running);
    guest.goes_on();
    assert_eq!(place.info()["state"], "running", "it is still found");
    done(place.ask(&["stop", "v", "--force"]));
    guest.end();
}

#[test]
fn a_killed_vmm_does_not_keep_its_vm_from_starting_again() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut guest = Guest::touching(&place);
    guest.process.kill().unwrap();
    guest.process.wait().unwrap();
    assert!(place.has_socket());
    place.assert_not_running();
    let ran = place.run(&code::hello(), &SMALL);
    assert_eq!(ran.status.code(), Some(0), "{}", said(&ran));
}

#[test]
fn vm_that_ended_is_not_found_and_its_dead_socket_is_replaced() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let ends: [(&[u8], i32); 3] = [(&code::hello(), 0), (&code::reset(), 10), (&code::crash(), 11)];
    for (kernel, expected) in ends {
        let ran = place.run(kernel, &SMALL);
        assert_eq!(ran.status.code(), Some(expected), "{}", said(&ran));
        place.assert_not_running();
    }
    let ran = place.run(b"no kernel", &SMALL);
    assert_eq!((ran.status.code(), place.has_socket()), (Some(1), false), "{}", said(&ran));
}

#[test]
fn nobody_is_not_found() {
    let place = Place::new();
    for command in ["info", "pause", "resume", "stop"] {
        let path: PathBuf = place.run_dir().join("v.sock");
        let expected = format!("error: VM v is not running: no listener on {}\n", path.display());
        refused(&place.ask(&[command, "v"]), 3, &expected);
    }
    refused(&place.ask(&["stop", "v", "--timeout", "2days"]), 2, "must be at most 1day");
}

#[test]
fn more_callers_than_there_are_places_for_wait_and_are_answered() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let guest = Guest::touching(&place);
    std::thread::scope(|scope| {
        for _ in 0..2 * units::limits::CONTROL_CONNECTIONS_MAX {
            scope.spawn(|| assert_eq!(place.info()["state"], "running"));
        }
    });
    done(place.ask(&["stop", "v", "--force"]));
    guest.end();
}
