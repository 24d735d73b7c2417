//! Tests of the control socket of a VMM: info, pause, resume and stop. Uses small guests, which run
//! on any /dev/kvm.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    io::{Read as _, Write as _},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tests::{
    small_guests::{self as code, can_run_small_guests},
    standalone_vm::{SMALL_MEMORY_OPTIONS, StandaloneVm},
};

/// Time limit of every wait in these tests.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Guest that prints repeatedly, so that its progress is visible on the console.
struct Guest<'a> {
    vm: &'a StandaloneVm,
    process: Child,
}

impl<'a> Guest<'a> {
    fn start(vm: &'a StandaloneVm, kernel: &[u8], options: &[&str]) -> Self {
        let process = vm.command(kernel, options).stderr(Stdio::piped()).spawn().unwrap();
        let mut guest = Self { vm, process };
        guest.wait_for_progress();
        guest
    }

    fn start_touching_memory(vm: &'a StandaloneVm) -> Self {
        Self::start(vm, &code::write_pool_memory(), &["--memory", "size=64MiB", "--pool", "size=1GiB"])
    }

    /// Waits for further output of the guest.
    fn wait_for_progress(&mut self) {
        let (before, start) = (self.vm.console().len(), Instant::now());
        while self.vm.console().len() < before + 3 {
            assert!(start.elapsed() < WAIT_TIMEOUT, "no further output of the guest");
            assert_eq!(self.process.try_wait().unwrap(), None, "the guest ended");
            std::thread::yield_now();
        }
    }

    fn terminate(&self) {
        kill_process(Pid::from_child(&self.process), Signal::TERM).unwrap();
    }

    /// Waits for the end of the VMM. Returns its exit code and stderr.
    fn wait_for_exit(mut self) -> (Option<i32>, String) {
        let (mut stderr, status) = (String::new(), self.process.wait().unwrap());
        self.process.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        self.vm.assert_not_running();
        (status.code(), stderr)
    }
}

/// Kills the guest if a test fails.
impl Drop for Guest<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn assert_success(output: Output) {
    assert_eq!((output.status.code(), stderr_of(&output).as_str()), (Some(0), ""));
}

fn assert_rejected(output: &Output, code: i32, expected: &str) {
    assert_eq!(output.status.code(), Some(code), "{}", stderr_of(output));
    assert!(stderr_of(output).contains(expected), "{}", stderr_of(output));
}

/// Guest that writes to its pool memory on request of the test.
struct InteractiveGuest {
    process: Child,
    input: ChildStdin,
    console: ChildStdout,
}

impl InteractiveGuest {
    fn start(vm: &StandaloneVm) -> Self {
        let options = ["--memory", "size=64MiB", "--pool", "size=1GiB", "--serial", "tty"];
        let mut command = vm.command(&code::write_when_typed(), &options);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, console) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Self { process, input, console }
    }

    /// Makes the guest write to 1 MiB of pool memory, and waits until the guest has written.
    fn write_next(&mut self) {
        self.input.write_all(b"x").unwrap();
        self.console.read_exact(&mut [0]).unwrap();
    }
}

impl Drop for InteractiveGuest {
    fn drop(&mut self) {
        let _ = self.process.kill(); // fails only if the process has already ended
        let _ = self.process.wait();
    }
}

#[test]
fn info_shows_nodes_and_touched_memory() {
    if !can_run_small_guests() {
        return;
    }
    const MIB: u64 = 1 << 20;
    let vm = StandaloneVm::new();
    let mut guest = InteractiveGuest::start(&vm);
    guest.write_next();
    let first = vm.info();
    guest.write_next();
    let second = vm.info();
    let touched = |report: &serde_json::Value| report["nodes"][1]["touched_bytes"].as_u64().unwrap();
    assert_eq!((touched(&first), touched(&second)), (MIB, 2 * MIB));
    assert_eq!(second["pid"], guest.process.id());
    let fixed = |key: &str| second["nodes"][1][key].clone();
    assert_eq!((fixed("kind"), fixed("bytes")), ("pool".into(), (1 << 30).into()));
    assert_eq!((second["state"].clone(), second["agent"].clone()), ("running".into(), ().into()));
    let output = vm.run_control_command(&["info", "v"]);
    let report = String::from_utf8(output.stdout).unwrap();
    assert!(report.contains("1     pool   -     1GiB    2MiB"), "{report}");
    assert_success(vm.run_control_command(&["stop", "v", "--force"]));
    assert_eq!(guest.process.wait().unwrap().code(), Some(12));
    vm.assert_not_running();
}

#[test]
fn paused_guest_stops_until_resumed() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let mut guest = Guest::start(
        &vm,
        &code::write_pool_memory(),
        &["--cpus=4", "--memory=size=64MiB", "--pool=size=1GiB"],
    );
    for _ in 0..20 {
        assert_success(vm.run_control_command(&["pause", "v"]));
        let output_len = vm.console().len();
        assert_success(vm.run_control_command(&["pause", "v"]));
        assert_eq!(vm.info()["state"], "paused");
        assert_eq!(vm.console().len(), output_len);
        assert_success(vm.run_control_command(&["resume", "v"]));
        assert_success(vm.run_control_command(&["resume", "v"]));
        assert_eq!(vm.info()["state"], "running");
        guest.wait_for_progress();
    }
    assert_success(vm.run_control_command(&["pause", "v"]));
    assert_success(vm.run_control_command(&["stop", "v", "--force"]));
    assert_eq!(guest.wait_for_exit(), (Some(12), "the guest was stopped at once on request\n".into()));
}

#[test]
fn stop_presses_power_button_and_waits_for_exit() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let guest = Guest::start(&vm, &code::wait_for_power_button(), &SMALL_MEMORY_OPTIONS);
    assert_success(vm.run_control_command(&["stop", "v"]));
    vm.assert_not_running();
    assert_eq!(guest.wait_for_exit(), (Some(0), String::new()));
}

#[test]
fn paused_guest_reacts_to_power_button() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let start_paused = || {
        let guest = Guest::start(&vm, &code::wait_for_power_button(), &SMALL_MEMORY_OPTIONS);
        assert_success(vm.run_control_command(&["pause", "v"]));
        guest
    };
    let guest = start_paused();
    assert_success(vm.run_control_command(&["stop", "v"]));
    assert_eq!(guest.wait_for_exit(), (Some(0), String::new()));
    let guest = start_paused();
    guest.terminate();
    assert_eq!(guest.wait_for_exit(), (Some(0), String::new()));
}

#[test]
fn unresponsive_guest_is_stopped_after_shutdown_timeout() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let options = ["--memory", "size=64MiB", "--pool", "size=1GiB", "--shutdown-timeout", "200ms"];
    let guest = Guest::start(&vm, &code::write_pool_memory(), &options);
    guest.terminate();
    let message = "the guest did not power off within 200ms and was stopped\n";
    assert_eq!(guest.wait_for_exit(), (Some(12), message.into()));
}

#[test]
fn unresponsive_guest_is_stopping_until_forced() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let guest = Guest::start_touching_memory(&vm);
    assert_rejected(
        &vm.run_control_command(&["stop", "v", "--timeout", "10ms"]),
        124,
        "VM v has not ended after 10ms; use --force to stop it at once",
    );
    assert_eq!(vm.info()["state"], "stopping");
    assert_rejected(&vm.run_control_command(&["pause", "v"]), 4, "VM v: the guest is powering off");
    assert_success(vm.run_control_command(&["stop", "v", "--force"]));
    assert_eq!(guest.wait_for_exit().0, Some(12));
}

#[test]
fn vm_cannot_run_twice() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let mut guest = Guest::start_touching_memory(&vm);
    let again = vm.run(&code::print_hello(), &["--memory", "size=64MiB", "--serial", "null"]);
    let running = format!("error: VM v is already running: process {} listens on ", guest.process.id());
    assert_rejected(&again, 1, &running);
    guest.wait_for_progress();
    assert_eq!(vm.info()["state"], "running", "the first VM must continue");
    assert_success(vm.run_control_command(&["stop", "v", "--force"]));
    guest.wait_for_exit();
}

#[test]
fn vm_restarts_after_its_vmm_was_killed() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let mut guest = Guest::start_touching_memory(&vm);
    guest.process.kill().unwrap();
    guest.process.wait().unwrap();
    assert!(vm.has_socket());
    vm.assert_not_running();
    let output = vm.run(&code::print_hello(), &SMALL_MEMORY_OPTIONS);
    assert_eq!(output.status.code(), Some(0), "{}", stderr_of(&output));
}

#[test]
fn ended_vm_is_not_found_and_stale_socket_is_replaced() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let ends: [(&[u8], i32); 3] =
        [(&code::print_hello(), 0), (&code::request_reset(), 10), (&code::cause_triple_fault(), 11)];
    for (kernel, expected) in ends {
        let output = vm.run(kernel, &SMALL_MEMORY_OPTIONS);
        assert_eq!(output.status.code(), Some(expected), "{}", stderr_of(&output));
        vm.assert_not_running();
    }
    let output = vm.run(b"no kernel", &SMALL_MEMORY_OPTIONS);
    assert_eq!((output.status.code(), vm.has_socket()), (Some(1), false), "{}", stderr_of(&output));
}

#[test]
fn missing_vm_is_not_found() {
    let vm = StandaloneVm::new();
    for command in ["info", "pause", "resume", "stop"] {
        let path: PathBuf = vm.run_dir().join("v.sock");
        let expected = format!("error: VM v is not running: no listener on {}\n", path.display());
        assert_rejected(&vm.run_control_command(&[command, "v"]), 3, &expected);
    }
    assert_rejected(&vm.run_control_command(&["stop", "v", "--timeout", "2days"]), 2, "must be at most 1day");
}

#[test]
fn excess_control_connections_wait_and_succeed() {
    if !can_run_small_guests() {
        return;
    }
    let vm = StandaloneVm::new();
    let guest = Guest::start_touching_memory(&vm);
    std::thread::scope(|scope| {
        for _ in 0..2 * units::limits::CONTROL_CONNECTIONS_MAX {
            scope.spawn(|| assert_eq!(vm.info()["state"], "running"));
        }
    });
    assert_success(vm.run_control_command(&["stop", "v", "--force"]));
    guest.wait_for_exit();
}
