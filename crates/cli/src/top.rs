//! `tarn top`: the rack, live. This file looks at the rack and at the keyboard; `picture.rs` draws.

mod picture;

use std::{
    io::{self, IsTerminal as _},
    ops::ControlFlow,
    thread,
};

use proto::v1;
use ratatui::crossterm::event::{self, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::{
    sync::mpsc,
    time::{self, Interval, MissedTickBehavior},
};
use tonic::Streaming;
use units::limits::{TOP_EVENTS_QUEUED_MAX, TOP_REFRESH_INTERVAL};

use crate::{Connection, Failure, lists, view};
use picture::{Picture, Seat};

/// What changes the picture. All of it comes through one queue, so that a manager that hangs never holds up a key.
enum News {
    Key(KeyEvent),
    Looked(Box<Picture>),
    Free(view::Capacity),
    /// The manager does not answer: the last picture stands.
    Trouble(String),
    /// The terminal is gone.
    Lost(Failure),
}

/// Shows the rack until a key ends it.
pub(crate) async fn run(to: &Connection) -> Result<(), Failure> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(Failure::Value {
            field: "output",
            value: "a pipe or a file".to_owned(),
            rule: "must be a terminal, as must be the input; `tarn get rack` and `tarn watch` write to anything",
        });
    }
    let first = look(to).await?;
    let (tell, news) = mpsc::channel(TOP_EVENTS_QUEUED_MAX);
    tokio::spawn(look_again(to.clone(), tell.clone()));
    tokio::spawn(watch_capacity(to.clone(), tell.clone()));
    let mut terminal = ratatui::try_init().map_err(Failure::Output)?;
    // A thread, as a terminal has no other way to wait. It ends with the process.
    thread::spawn(move || while tell.blocking_send(key()).is_ok() {});
    let draw = |picture: &Picture, seat: &Seat| {
        terminal.draw(|frame| picture::draw(frame, picture, seat)).map(|_| ()).map_err(Failure::Output)
    };
    let done = show(first, news, draw).await;
    ratatui::restore();
    done
}

/// Draws after every piece of news, until a key says that it is enough.
async fn show(
    mut picture: Picture,
    mut news: mpsc::Receiver<News>,
    mut draw: impl FnMut(&Picture, &Seat) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut seat = Seat::default();
    draw(&picture, &seat)?;
    while let Some(news) = news.recv().await {
        match news {
            News::Key(key) => {
                if pressed(key, &picture, &mut seat).is_break() {
                    break;
                }
            }
            News::Looked(fresh) => picture = Picture { free: picture.free, ..*fresh },
            News::Free(free) => picture.free = free,
            News::Trouble(why) => picture.trouble = Some(why),
            News::Lost(failure) => return Err(failure),
        }
        draw(&picture, &seat)?;
    }
    Ok(())
}

/// Looks every second, for as long as anybody listens.
async fn look_again(to: Connection, tell: mpsc::Sender<News>) {
    let mut second = each_second();
    loop {
        second.tick().await;
        let news = match look(&to).await {
            Ok(picture) => News::Looked(Box::new(picture)),
            Err(failure) => News::Trouble(failure.sentence()),
        };
        if tell.send(news).await.is_err() {
            return;
        }
    }
}

/// Follows free capacity, for as long as anybody listens; a watch that ends is begun again.
async fn watch_capacity(to: Connection, tell: mpsc::Sender<News>) {
    let mut second = each_second();
    while !tell.is_closed() {
        second.tick().await;
        if let Ok(stream) = to.ask(to.scheduler().watch_capacity(v1::WatchCapacityRequest {})).await {
            follow(stream, &tell).await;
        }
    }
}

async fn follow(mut stream: Streaming<v1::Capacity>, tell: &mpsc::Sender<News>) {
    while let Ok(Some(free)) = stream.message().await {
        if tell.send(News::Free(free.into())).await.is_err() {
            return;
        }
    }
}

fn each_second() -> Interval {
    let mut second = time::interval(TOP_REFRESH_INTERVAL.as_duration());
    second.set_missed_tick_behavior(MissedTickBehavior::Delay);
    second
}

/// Waits for the next key.
fn key() -> News {
    loop {
        match event::read() {
            Ok(event::Event::Key(key)) if key.kind == KeyEventKind::Press => return News::Key(key),
            Ok(_) => {}
            Err(errno) => return News::Lost(Failure::Output(errno)),
        }
    }
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

    #[tokio::test]
    async fn the_view_follows_the_rack_and_outlives_a_silent_manager() {
        let (tell, news) = mpsc::channel(TOP_EVENTS_QUEUED_MAX);
        let fresh = Picture { hosts: Vec::new(), ..picture::tests::rack() };
        let free = view::Capacity { revision: 5, ..view::Capacity::default() };
        let leave = KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE);
        let story = [
            News::Free(free),
            News::Trouble("no answer".into()),
            News::Looked(Box::new(fresh)),
            News::Key(leave),
        ];
        for chapter in story {
            tell.send(chapter).await.unwrap();
        }
        let mut drawn = Vec::new();
        let draw = |p: &Picture, _: &Seat| {
            drawn.push((p.hosts.len(), p.free.revision, p.trouble.is_some()));
            Ok(())
        };
        show(picture::tests::rack(), news, draw).await.unwrap();
        assert_eq!(drawn, [(2, 0, false), (2, 5, false), (2, 5, true), (0, 5, false)]);
    }
}
