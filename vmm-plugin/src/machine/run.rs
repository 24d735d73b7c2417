//! Event loop of a running guest. The loop handles terminal input, signals, control requests and
//! vCPU exits. The loop also decides when the guest ends.

use std::{
    fs::File,
    io::{self, Read as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    termios::{OptionalActions, tcgetattr, tcsetattr},
};
use units::limits::LOST_SLICE_CHECK_INTERVAL;

use super::{GuestParts, GuestResources, Machine, MachineError, system_error};
use crate::{
    config::{Config, Console},
    confine::threads::SeccompFilters,
    control::{Action, ControlRequest, GuestActionError, RequestSender, State},
    devices::{ExitRequest, serial::Output},
    exit,
    memory::{fault, poison},
    rehome::{RehomeControl, RehomeLimits, Rehomer},
    thread_role::ThreadRole,
    vcpu::{ExitReason, PauseReason},
    vcpu_threads::{StartError, VcpuThreads},
    wakeup::Wakeup,
};

/// Maximum number of bytes that one read from the terminal returns.
const INPUT_CHUNK_BYTES: usize = 64;
/// Delay before the next attempt to pass input to a UART whose buffer was full.
const INPUT_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Opens the destination for the output of the serial console.
pub(super) fn open_output(console: &Console) -> Result<Output, MachineError> {
    match console {
        Console::Terminal => Ok(Box::new(io::stdout())),
        Console::Null => Ok(Box::new(io::sink())),
        Console::File(path) => {
            let failed =
                |errno| MachineError::Console { operation: format!("write {}", path.display()), errno };
            Ok(Box::new(File::create(path).map_err(failed)?))
        }
    }
}

/// Runs a guest until it ends. Returns the exit code of the process, one of the constants in
/// [`exit`].
///
/// # Errors
/// [`MachineError`] if the guest could not be started.
pub fn run(machine: Machine, config: &Config) -> Result<u8, MachineError> {
    let Machine { confinement, guest } = machine;
    let seccomp = confinement.seccomp;
    confinement.enter()?;
    let signals = register_signals().map_err(system_error("register handlers for SIGTERM and SIGINT"))?;
    let reads_input = config.console == Console::Terminal;
    if reads_input {
        set_raw_mode();
    }
    let filters = SeccompFilters::new(seccomp).map_err(system_error("install a SIGSYS handler"))?;
    let mut guest = Guest::start(guest, config.shutdown_timeout, &filters)?;
    filters.confine(ThreadRole::Main).map_err(system_error("confine the main thread"))?;
    let end = guest.run_event_loop(&signals, reads_input);
    let code = report_guest_end(&end, config.shutdown_timeout);
    guest.vcpus.stop();
    Ok(code)
}

/// Prints why the guest ended and returns the exit code of the process.
fn report_guest_end(end: &GuestEnd, shutdown_timeout: Duration) -> u8 {
    match end {
        GuestEnd::Vcpu(ExitReason::Requested(ExitRequest::PowerOff)) => exit::GUEST_POWERED_OFF,
        GuestEnd::Vcpu(ExitReason::Requested(ExitRequest::Reset)) => {
            exit::print("the guest requested a reset");
            exit::GUEST_RESET
        }
        GuestEnd::Vcpu(ExitReason::Crashed(reason)) => {
            exit::print(&format!("error: the guest crashed: {reason}"));
            exit::GUEST_CRASHED
        }
        GuestEnd::Vcpu(ExitReason::Failed(reason)) => {
            exit::print(&format!("error: {reason}"));
            exit::FAILED
        }
        GuestEnd::TimedOut => {
            let timeout = humantime::format_duration(shutdown_timeout);
            exit::print(&format!("the guest did not power off within {timeout} and was stopped"));
            exit::GUEST_STOPPED
        }
        GuestEnd::Interrupted => {
            exit::print("the guest was stopped by a second signal before it powered off");
            exit::GUEST_STOPPED
        }
        GuestEnd::Killed => {
            exit::print("the guest was stopped at once on request");
            exit::GUEST_STOPPED
        }
    }
}

/// Reason why a guest ended.
enum GuestEnd {
    /// A vCPU exited.
    Vcpu(ExitReason),
    /// The guest did not power off in time.
    TimedOut,
    /// A second SIGTERM or SIGINT arrived.
    Interrupted,
    /// A client requested to end the guest at once.
    Killed,
}

/// Running guest, with the state of its event loop.
struct Guest {
    resources: GuestResources,
    vcpus: Arc<VcpuThreads>,
    exits: mpsc::Receiver<ExitReason>,
    requests: mpsc::Receiver<ControlRequest>,
    /// Eventfd that becomes readable on a vCPU exit or a control request.
    wakeup: Arc<Wakeup>,
    paused: bool,
    /// Time for the guest to power off after the power button is pressed.
    shutdown_timeout: Duration,
    /// Time at which the VMM stops the guest. Set when the power button is pressed.
    stop_at: Option<Instant>,
    /// Time of the last check for revoked memory.
    memory_checked_at: Instant,
    /// Terminal input that is not in the UART buffer yet, because the buffer was full.
    pending_input: Vec<u8>,
}

impl Guest {
    fn start(
        assembled: GuestParts,
        shutdown_timeout: Duration,
        filters: &SeccompFilters,
    ) -> Result<Self, MachineError> {
        let wakeup = Arc::new(Wakeup::new().map_err(system_error("create an eventfd"))?);
        let (exit_sender, exits) = mpsc::channel();
        let (request_sender, requests) = RequestSender::new(Arc::clone(&wakeup));
        let GuestParts { resources, vcpus, workers, control } = assembled;
        let rehome = control.rehome().clone();
        control.start(request_sender, filters).map_err(system_error("start a thread"))?;
        for worker in workers {
            worker.start(filters).map_err(system_error("start a thread"))?;
        }
        let vcpus = VcpuThreads::start(vcpus, (&resources.context, filters), &exit_sender, &wakeup)
            .map_err(|StartError { operation, errno }| system_error(operation)(errno))?;
        let vcpus = Arc::new(vcpus);
        if rehome.is_possible() {
            start_rehomer(&rehome, &resources, &vcpus, filters)?;
        }
        let memory_checked_at = Instant::now();
        Ok(Self {
            resources,
            vcpus,
            exits,
            requests,
            wakeup,
            paused: false,
            shutdown_timeout,
            stop_at: None,
            memory_checked_at,
            pending_input: Vec::new(),
        })
    }

    fn run_event_loop(&mut self, signals: &UnixStream, mut reads_input: bool) -> GuestEnd {
        loop {
            let stdin = rustix::stdio::stdin();
            let mut poll_fds = vec![
                PollFd::new(&*self.wakeup, PollFlags::IN),
                PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            ];
            if reads_input && self.pending_input.is_empty() {
                poll_fds.push(PollFd::from_borrowed_fd(stdin, PollFlags::IN));
            }
            let wait =
                Timespec::try_from(self.poll_timeout()).expect("the timeout is at most the check interval");
            match poll(&mut poll_fds, Some(&wait)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return GuestEnd::Vcpu(ExitReason::Failed(format!("poll: {errno}"))),
            }
            let ready: Vec<bool> = poll_fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            // Clear before reading the queues, so that later notifications are not lost.
            self.wakeup.clear();
            self.check_memory();
            if poison::has_unconsumed_error() {
                self.vcpus.kick_first_vcpu();
            }
            if let Some(end) = self.handle_events(if ready[1] { read_signal_count(signals) } else { 0 }) {
                return end;
            }
            if self.stop_at.is_some_and(|at| at <= Instant::now()) {
                return GuestEnd::TimedOut;
            }
            if ready.get(2) == Some(&true) {
                reads_input = self.read_input();
            }
            self.forward_input();
        }
    }

    /// Returns the time until the earliest of the next memory check, the next input retry and the
    /// stop deadline.
    fn poll_timeout(&self) -> Duration {
        let until_stop = self.stop_at.map(|at| at.saturating_duration_since(Instant::now()));
        let until_memory_check =
            LOST_SLICE_CHECK_INTERVAL.as_duration().saturating_sub(self.memory_checked_at.elapsed());
        let until_input_retry = (!self.pending_input.is_empty()).then_some(INPUT_RETRY_INTERVAL);
        [until_stop, until_input_retry].into_iter().flatten().fold(until_memory_check, Duration::min)
    }

    /// Checks for revoked memory if the last check was at least [`LOST_SLICE_CHECK_INTERVAL`] ago.
    /// Ends the process if memory was revoked.
    fn check_memory(&mut self) {
        if self.memory_checked_at.elapsed() >= LOST_SLICE_CHECK_INTERVAL.as_duration() {
            fault::exit_if_revoked();
            self.memory_checked_at = Instant::now();
        }
    }

    /// Handles pending vCPU exits, signals and control requests. Returns why the guest ends, or
    /// `None` if the guest continues.
    fn handle_events(&mut self, signal_count: usize) -> Option<GuestEnd> {
        if let Ok(end) = self.exits.try_recv() {
            return Some(GuestEnd::Vcpu(end));
        }
        if signal_count > 1 || signal_count > 0 && self.stop_at.is_some() {
            // Two signals may have arrived since the last iteration of the loop.
            return Some(GuestEnd::Interrupted);
        }
        if signal_count > 0 {
            self.press_power_button();
        }
        while let Ok(ControlRequest { action, reply }) = self.requests.try_recv() {
            let _ = reply.send(self.execute(action)); // the client may have disconnected
            if action == Action::Kill {
                return Some(GuestEnd::Killed);
            }
        }
        None
    }

    fn execute(&mut self, action: Action) -> Result<State, GuestActionError> {
        match action {
            Action::QueryState | Action::Kill => {}
            Action::Pause => self.pause()?,
            Action::Resume => self.resume(),
            Action::PressPowerButton => self.press_power_button(),
        }
        Ok(self.state())
    }

    fn state(&self) -> State {
        match (self.stop_at, self.paused) {
            (Some(_), _) => State::Stopping,
            (None, true) => State::Paused,
            (None, false) => State::Running,
        }
    }

    fn pause(&mut self) -> Result<(), GuestActionError> {
        if self.stop_at.is_some() {
            return Err(GuestActionError::Stopping);
        }
        self.paused = self.vcpus.pause(PauseReason::Client);
        if self.paused { Ok(()) } else { Err(GuestActionError::Busy) }
    }

    fn resume(&mut self) {
        self.vcpus.resume(PauseReason::Client);
        self.paused = false;
    }

    /// Presses the power button. A paused guest is resumed first, because a paused guest cannot
    /// react to the power button.
    fn press_power_button(&mut self) {
        self.resume();
        let _ = self.resources.power_button.write(1);
        self.stop_at.get_or_insert_with(|| Instant::now() + self.shutdown_timeout);
    }

    /// Reads terminal input. Returns `false` at the end of the input or on an error.
    fn read_input(&mut self) -> bool {
        let mut bytes = [0; INPUT_CHUNK_BYTES];
        match rustix::io::read(rustix::stdio::stdin(), &mut bytes) {
            Err(Errno::INTR | Errno::AGAIN) => true,
            Ok(0) | Err(_) => false,
            Ok(count) => {
                self.pending_input.extend_from_slice(&bytes[..count]);
                true
            }
        }
    }

    /// Forwards as much pending input as fits into the UART buffer. Does not wait for the lock of
    /// the UART, because a vCPU may hold the lock while its output blocks.
    fn forward_input(&mut self) {
        if !self.pending_input.is_empty()
            && let Some(mut serial) = self.resources.context.ports.try_lock_serial()
        {
            let count = serial.enqueue_input(&self.pending_input);
            self.pending_input.drain(..count);
        }
    }
}

/// Starts the thread that moves pool memory to local memory on request.
fn start_rehomer(
    control: &RehomeControl,
    GuestResources { context, vm, memory, .. }: &GuestResources,
    vcpus: &Arc<VcpuThreads>,
    filters: &SeccompFilters,
) -> Result<(), MachineError> {
    let limits = RehomeLimits::default();
    let rehomer = Rehomer::new(control, limits, (vm, memory), vcpus, &context.windows);
    let thread = filters.spawn(ThreadRole::Rehome, "rehome".into(), move || rehomer.run());
    thread.map(drop).map_err(system_error("start a thread"))
}

/// Installs handlers for SIGTERM and SIGINT. Each signal writes one byte to the returned stream.
fn register_signals() -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    for signal in [libc::SIGTERM, libc::SIGINT] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    Ok(read)
}

/// Returns the number of signals received since the previous call, at most 16.
fn read_signal_count(mut signals: &UnixStream) -> usize {
    signals.read(&mut [0; 16]).unwrap_or(0)
}

/// Sets the terminal to raw mode, so that the guest receives all key presses, including Ctrl-C.
fn set_raw_mode() {
    let stdin = rustix::stdio::stdin();
    if let Ok(settings) = tcgetattr(stdin) {
        let mut raw = settings.clone();
        raw.make_raw();
        raw.output_modes = settings.output_modes;
        if tcsetattr(stdin, OptionalActions::Now, &raw).is_ok() {
            exit::save_terminal_settings(settings);
        }
    }
}
