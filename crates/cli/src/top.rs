//! `tarn top`: the rack, live. This file looks at the rack and at the keyboard; `picture.rs` draws.

mod picture;

use std::{
    io::{self, IsTerminal as _},
    ops::ControlFlow,
    thread,
};

use proto::v1;
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
};
use tokio::{
    sync::mpsc,
    time::{self, MissedTickBehavior},
};
use tonic::Streaming;
use units::limits::{KEYS_AHEAD_MAX, TOP_EVERY};

use crate::{Connection, Failure, lists, view};
use picture::{Picture, Seat};

/// Shows the rack until a key ends it.
pub(crate) async fn run(to: &Connection) -> Result<(), Failure> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Failure::Value {
            field: "top",
            value: "a pipe or a file".to_owned(),
            rule: "must have a terminal; `tarn get rack` and `tarn watch` write to anything",
        });
    }
    let first = look(to).await?;
    let capacity = watch(to).await?;
    let terminal = ratatui::try_init().map_err(Failure::Output)?;
    let done = show(terminal, first, capacity, to).await;
    ratatui::restore();
    done
}

/// Draws after every key, every change of capacity and every second.
async fn show(
    mut terminal: DefaultTerminal,
    mut picture: Picture,
    capacity: Streaming<v1::Capacity>,
    to: &Connection,
) -> Result<(), Failure> {
    let mut seat = Seat::default();
    let mut keys = keys();
    let mut capacity = Some(capacity);
    let mut second = time::interval(TOP_EVERY.as_duration());
    second.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        terminal.draw(|frame| picture::draw(frame, &picture, &seat)).map_err(Failure::Output)?;
        tokio::select! {
            key = keys.recv() => match key {
                Some(key) => if pressed(key?, &picture, &mut seat).is_break() { return Ok(()) },
                None => return Ok(()),
            },
            news = next(&mut capacity) => match news {
                Some(free) => picture.free = free,
                None => capacity = None,
            },
            _ = second.tick() => refresh(&mut picture, &mut capacity, to).await,
        }
    }
}

/// Looks again. A manager that does not answer leaves the last picture standing, with a word about it.
async fn refresh(picture: &mut Picture, capacity: &mut Option<Streaming<v1::Capacity>>, to: &Connection) {
    match look(to).await {
        Ok(fresh) => *picture = Picture { free: std::mem::take(&mut picture.free), ..fresh },
        Err(failure) => picture.trouble = Some(failure.sentence()),
    }
    if capacity.is_none() {
        *capacity = watch(to).await.ok();
    }
}

/// The next word about free capacity; `None` when the watch has ended; never while there is none.
async fn next(capacity: &mut Option<Streaming<v1::Capacity>>) -> Option<view::Capacity> {
    match capacity {
        Some(stream) => stream.message().await.ok().flatten().map(view::Capacity::from),
        None => std::future::pending().await,
    }
}

async fn watch(to: &Connection) -> Result<Streaming<v1::Capacity>, Failure> {
    to.ask(to.scheduler().watch_capacity(v1::WatchCapacityRequest {})).await
}

async fn look(to: &Connection) -> Result<Picture, Failure> {
    Ok(Picture {
        rack: lists::rack(to).await?.into(),
        hosts: lists::hosts(to).await?.into_iter().map(view::Host::from).collect(),
        emcs: lists::emcs(to).await?.into_iter().map(view::Emc::from).collect(),
        slices: lists::slices(to, 0, u32::MAX).await?.into_iter().map(view::Slice::from).collect(),
        free: view::Capacity::default(),
        trouble: None,
    })
}

/// Keys, read by a thread of their own: a terminal has no other way to wait. It ends with the process.
fn keys() -> mpsc::Receiver<Result<KeyEvent, Failure>> {
    let (pressed, keys) = mpsc::channel(KEYS_AHEAD_MAX);
    thread::spawn(move || {
        loop {
            let key = match event::read() {
                Ok(event::Event::Key(key)) if key.kind == KeyEventKind::Press => Ok(key),
                Ok(_) => continue,
                Err(errno) => Err(Failure::Output(errno)),
            };
            if pressed.blocking_send(key).is_err() {
                return;
            }
        }
    });
    keys
}

fn pressed(key: KeyEvent, picture: &Picture, seat: &mut Seat) -> ControlFlow<()> {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => return ControlFlow::Break(()),
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return ControlFlow::Break(()),
        KeyCode::Down => seat.host = (seat.host + 1).min(picture.hosts.len().saturating_sub(1)),
        KeyCode::Up => seat.host = seat.host.saturating_sub(1),
        KeyCode::Right => seat.emc = (seat.emc + 1).min(picture.emcs.len().saturating_sub(1)),
        KeyCode::Left => seat.emc = seat.emc.saturating_sub(1),
        _ => {}
    }
    ControlFlow::Continue(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrows_stay_on_the_rack_and_q_ends_the_view() {
        let (picture, mut seat) = (picture::tests::rack(), Seat::default());
        let mut press = |code| pressed(KeyEvent::new(code, KeyModifiers::NONE), &picture, &mut seat);
        for _ in 0..9 {
            assert!(press(KeyCode::Down).is_continue() && press(KeyCode::Right).is_continue());
        }
        assert!(press(KeyCode::Char('q')).is_break() && press(KeyCode::Esc).is_break());
        assert_eq!((seat.host, seat.emc), (1, 1), "two hosts, two EMCs");
    }
}
