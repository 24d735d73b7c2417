//! `tarn top`: live view of the rack. This file polls the rack and the keyboard; `screen.rs` draws
//! the view.

mod screen;

use std::{
    io::{self, IsTerminal as _},
    ops::ControlFlow,
    thread,
    time::Duration,
};

use proto::v1;
use ratatui::crossterm::{
    event::{self, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
    terminal::disable_raw_mode,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    time::{self, Interval, MissedTickBehavior},
};
use tonic::Streaming;
use units::{
    Name,
    limits::{TOP_EVENTS_QUEUED_MAX, TOP_REFRESH_INTERVAL},
};

use crate::{Connection, Failure, Format, lists, tenants, view};
use screen::{Selection, Snapshot};

/// Time limit for restoring the terminal after a signal.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(1);
/// Exit code after a signal, without the number of the signal, as in a shell.
const SIGNAL_EXIT_CODE_BASE: i32 = 128;

/// Update of the view. Background tasks send all updates through one queue, so that an unresponsive
/// manager does not delay key presses.
enum Update {
    Key(KeyEvent),
    Snapshot(Box<Snapshot>),
    Capacity(view::Capacity),
    /// Tenants of a host; `None` if the host has not reported any.
    Tenants(Option<Box<tenants::Tenants>>),
    /// Polling the manager failed. The view keeps the last snapshot and shows the error.
    Error(String),
    /// Reading from the terminal failed.
    TerminalLost(Failure),
}

/// Shows the rack until the user quits or a signal ends the process.
pub(crate) async fn run(manager: &Connection, format: Format) -> Result<(), Failure> {
    if matches!(format, Format::Json | Format::Yaml) {
        let value = if format == Format::Json { "json" } else { "yaml" }.to_owned();
        let rule = "`tarn top` is interactive; use `tarn get rack` or `tarn watch` instead".into();
        return Err(Failure::InvalidValue { field: "--output", value, rule });
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Failure::InvalidValue {
            field: "stdin and stdout",
            value: "a pipe or a file".to_owned(),
            rule: "must both be a terminal; use `tarn get rack` or `tarn watch` instead".into(),
        });
    }
    let first = load_snapshot(manager).await?;
    let (sender, updates) = mpsc::channel(TOP_EVENTS_QUEUED_MAX);
    tokio::spawn(poll_rack(manager.clone(), sender.clone()));
    tokio::spawn(watch_capacity(manager.clone(), sender.clone()));
    let (selected, selected_host) = watch::channel(host_name(&first, &Selection::default()));
    tokio::spawn(poll_tenants(manager.clone(), selected_host, sender.clone()));
    end_on_signals().map_err(Failure::Output)?;
    let mut terminal = ratatui::try_init().map_err(Failure::Output)?;
    // Reading a key blocks, so it needs a thread. The thread ends with the process.
    thread::spawn(move || while sender.blocking_send(next_key_press()).is_ok() {});
    let draw = |snapshot: &Snapshot, selection: &Selection| {
        terminal.draw(|frame| screen::draw(frame, snapshot, selection)).map(|_| ()).map_err(Failure::Output)
    };
    let done = run_view(first, updates, &selected, draw).await;
    ratatui::restore();
    done
}

/// Restores the terminal and ends the process after a termination signal. Without a handler, the process
/// would end without restoring the terminal. The handlers are separate tasks, because drawing blocks while
/// the terminal is stopped.
fn end_on_signals() -> io::Result<()> {
    let signals = [(SignalKind::interrupt(), 2), (SignalKind::terminate(), 15), (SignalKind::hangup(), 1)];
    for (kind, number) in signals {
        let mut received = signal(kind)?;
        tokio::spawn(async move {
            received.recv().await;
            // This does not write to the terminal, which may be stopped.
            let _ = disable_raw_mode();
            let _ = time::timeout(RESTORE_TIMEOUT, tokio::task::spawn_blocking(ratatui::restore)).await;
            exit_after_signal(number);
        });
    }
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "a stopped terminal may block the task that would return from main"
)]
fn exit_after_signal(number: i32) -> ! {
    std::process::exit(SIGNAL_EXIT_CODE_BASE + number)
}

/// Redraws after every update until the user quits. Sends the name of the selected host to `selected`.
async fn run_view(
    mut snapshot: Snapshot,
    mut updates: mpsc::Receiver<Update>,
    selected: &watch::Sender<Option<String>>,
    mut draw: impl FnMut(&Snapshot, &Selection) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut selection = Selection::default();
    draw(&snapshot, &selection)?;
    while let Some(update) = updates.recv().await {
        match update {
            Update::Key(key) => {
                if handle_key(key, &snapshot, &mut selection).is_break() {
                    break;
                }
            }
            Update::Snapshot(fresh) => {
                snapshot = Snapshot { free: snapshot.free, tenants: snapshot.tenants, ..*fresh };
            }
            Update::Capacity(free) => snapshot.free = free,
            Update::Tenants(tenants) => snapshot.tenants = tenants.map(|tenants| *tenants),
            Update::Error(error) => snapshot.error = Some(error),
            Update::TerminalLost(failure) => return Err(failure),
        }
        let host = host_name(&snapshot, &selection);
        snapshot.tenants = snapshot.tenants.filter(|tenants| Some(&tenants.host) == host.as_ref());
        selected.send_if_modified(|known| std::mem::replace(known, host.clone()) != host);
        draw(&snapshot, &selection)?;
    }
    Ok(())
}

/// Returns the name of the selected host.
fn host_name(snapshot: &Snapshot, selection: &Selection) -> Option<String> {
    snapshot.hosts.get(selection.host).map(|host| host.host.clone())
}

/// Polls the rack every second until the view ends.
async fn poll_rack(manager: Connection, updates: mpsc::Sender<Update>) {
    let mut interval = refresh_interval();
    loop {
        interval.tick().await;
        let update = match load_snapshot(&manager).await {
            Ok(snapshot) => Update::Snapshot(Box::new(snapshot)),
            Err(failure) => Update::Error(failure.message()),
        };
        if updates.send(update).await.is_err() {
            return;
        }
    }
}

/// Polls the tenants of the selected host every second, and after each change of the selection, until the
/// view ends.
async fn poll_tenants(
    manager: Connection,
    mut selected: watch::Receiver<Option<String>>,
    updates: mpsc::Sender<Update>,
) {
    let mut interval = refresh_interval();
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            changed = selected.changed() => if changed.is_err() { return },
        }
        let host = selected.borrow_and_update().as_deref().and_then(|host| Name::new(host).ok());
        let Some(host) = host else { continue };
        // Hosts without fair tiering report no tenants. Other errors also concern the snapshot, which shows
        // them.
        let tenants = tenants::load(host, &manager).await.ok().map(Box::new);
        if updates.send(Update::Tenants(tenants)).await.is_err() {
            return;
        }
    }
}

/// Watches the free capacity until the view ends. Reopens the watch if its stream ends earlier.
async fn watch_capacity(manager: Connection, updates: mpsc::Sender<Update>) {
    let mut interval = refresh_interval();
    while !updates.is_closed() {
        interval.tick().await;
        if let Ok(stream) =
            manager.call(manager.scheduler().watch_capacity(v1::WatchCapacityRequest {})).await
        {
            forward_capacity(stream, &updates).await;
        }
    }
}

async fn forward_capacity(mut stream: Streaming<v1::Capacity>, updates: &mpsc::Sender<Update>) {
    while let Ok(Some(free)) = stream.message().await {
        if updates.send(Update::Capacity(free.into())).await.is_err() {
            return;
        }
    }
}

fn refresh_interval() -> Interval {
    let mut interval = time::interval(TOP_REFRESH_INTERVAL.as_duration());
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

/// Waits for the next key press.
fn next_key_press() -> Update {
    loop {
        match event::read() {
            Ok(event::Event::Key(key)) if key.kind == KeyEventKind::Press => return Update::Key(key),
            Ok(_) => {}
            Err(errno) => return Update::TerminalLost(Failure::Output(errno)),
        }
    }
}

async fn load_snapshot(manager: &Connection) -> Result<Snapshot, Failure> {
    Ok(Snapshot {
        rack: lists::rack(manager).await?.into(),
        hosts: lists::hosts(manager).await?.into_iter().map(view::Host::from).collect(),
        emcs: lists::emcs(manager).await?.into_iter().map(view::Emc::from).collect(),
        slices: lists::slices(manager, 0, u32::MAX).await?.into_iter().map(view::Slice::from).collect(),
        suspects: find_suspects(lists::reservations(manager, false).await?),
        free: view::Capacity::default(),
        tenants: None,
        error: None,
    })
}

/// Returns the VMs with the verdict watch or migrate, the latter first. VMs with the same verdict are
/// ordered by their slowdown, and by their accesses to the pool memory.
fn find_suspects(reservations: Vec<v1::Reservation>) -> Vec<view::Vm> {
    let suspects = reservations.into_iter().map(view::Vm::from);
    let mut suspects: Vec<_> =
        suspects.filter(|vm| matches!(vm.verdict.as_str(), "watch" | "migrate")).collect();
    let harm = |vm: &view::Vm| [vm.loss, vm.accessed_share].map(|share| share.unwrap_or(0.0));
    suspects.sort_by(|one, other| {
        let ([loss, accessed], [other_loss, other_accessed]) = (harm(one), harm(other));
        let by_verdict = one.verdict.cmp(&other.verdict);
        by_verdict.then(other_loss.total_cmp(&loss)).then(other_accessed.total_cmp(&accessed))
    });
    suspects
}

fn handle_key(key: KeyEvent, snapshot: &Snapshot, selection: &mut Selection) -> ControlFlow<()> {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return ControlFlow::Break(()),
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return ControlFlow::Break(()),
        KeyCode::Down => selection.host = (selection.host + 1).min(snapshot.hosts.len().saturating_sub(1)),
        KeyCode::Up => selection.host = selection.host.saturating_sub(1),
        KeyCode::Right => selection.emc = (selection.emc + 1).min(snapshot.emcs.len().saturating_sub(1)),
        KeyCode::Left => selection.emc = selection.emc.saturating_sub(1),
        _ => {}
    }
    ControlFlow::Continue(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrow_keys_stop_at_the_end_of_lists_and_q_quits() {
        let (snapshot, mut selection) = (screen::tests::sample_snapshot(), Selection::default());
        let mut press = |code| handle_key(KeyEvent::new(code, KeyModifiers::NONE), &snapshot, &mut selection);
        for _ in 0..9 {
            assert!(press(KeyCode::Down).is_continue() && press(KeyCode::Right).is_continue());
        }
        assert!(press(KeyCode::Char('q')).is_break() && press(KeyCode::Esc).is_break());
        assert_eq!((selection.host, selection.emc), (1, 1), "the last of two hosts and of two EMCs");
    }

    #[test]
    fn most_harmed_suspects_come_first() {
        let vm = |vm: &str, verdict, loss, accessed_share| {
            let monitoring = v1::Monitoring { verdict, loss, accessed_share, ..Default::default() };
            v1::Reservation { vm: vm.into(), monitoring: Some(monitoring), ..Default::default() }
        };
        let suspects = find_suspects(vec![
            vm("fine", 1, Some(0.9), None),
            vm("watch", 2, Some(0.5), None),
            vm("accesses", 3, None, Some(0.9)),
            vm("slow", 3, Some(0.1), Some(0.1)),
            vm("slower", 3, Some(0.2), None),
            v1::Reservation { vm: "unsampled".into(), ..Default::default() },
        ]);
        let names: Vec<_> = suspects.iter().map(|vm| vm.vm.as_str()).collect();
        assert_eq!(names, ["slower", "slow", "accesses", "watch"]);
    }

    #[tokio::test]
    async fn view_is_updated_and_keeps_last_snapshot_after_an_error() {
        let (sender, updates) = mpsc::channel(TOP_EVENTS_QUEUED_MAX);
        let fresh = Snapshot { hosts: Vec::new(), ..screen::tests::sample_snapshot() };
        let free = view::Capacity { revision: 5, ..view::Capacity::default() };
        let quit = KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE);
        let sequence = [
            Update::Capacity(free),
            Update::Error("no answer".into()),
            Update::Snapshot(Box::new(fresh)),
            Update::Key(quit),
        ];
        for update in sequence {
            sender.send(update).await.unwrap();
        }
        let mut drawn = Vec::new();
        let draw = |p: &Snapshot, _: &Selection| {
            drawn.push((p.hosts.len(), p.free.revision, p.error.is_some()));
            Ok(())
        };
        let (selected, _) = watch::channel(None);
        run_view(screen::tests::sample_snapshot(), updates, &selected, draw).await.unwrap();
        assert_eq!(drawn, [(2, 0, false), (2, 5, false), (2, 5, true), (0, 5, false)]);
    }

    #[tokio::test]
    async fn tenants_of_the_selected_host_are_shown() {
        let (sender, updates) = mpsc::channel(TOP_EVENTS_QUEUED_MAX);
        let key = |code| Update::Key(KeyEvent::new(code, KeyModifiers::NONE));
        let tenants = |host: &str| Update::Tenants(Some(Box::new(screen::tests::sample_tenants(host))));
        let fresh = Update::Snapshot(Box::new(screen::tests::sample_snapshot()));
        let sequence = [
            tenants("h1"),
            fresh,
            key(KeyCode::Down),
            tenants("h1"), // a late answer about the host that was selected before
            tenants("h2"),
            Update::Tenants(None),
            key(KeyCode::Char('q')),
        ];
        for update in sequence {
            sender.send(update).await.unwrap();
        }
        let mut drawn = Vec::new();
        let draw = |p: &Snapshot, _: &Selection| {
            drawn.push(p.tenants.as_ref().map(|tenants| tenants.host.clone()).unwrap_or_default());
            Ok(())
        };
        let (selected, host) = watch::channel(None);
        run_view(screen::tests::sample_snapshot(), updates, &selected, draw).await.unwrap();
        assert_eq!(drawn, ["", "h1", "h1", "", "", "h2", ""]);
        assert_eq!(host.borrow().as_deref(), Some("h2"));
    }
}
