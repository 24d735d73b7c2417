//! One picture of a rack: hosts, EMCs with every slice as one coloured letter, alarms. A pure function of what was seen.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize as _},
    text::{Line, Span},
    widgets::{Block, Cell, Paragraph, Row, Table, TableState},
};

use crate::{table, view};

/// What there is to see.
#[derive(Clone, Debug)]
pub(super) struct Picture {
    pub(super) rack: view::Rack,
    pub(super) hosts: Vec<view::Host>,
    pub(super) emcs: Vec<view::Emc>,
    pub(super) slices: Vec<view::Slice>,
    pub(super) free: view::Capacity,
    /// Why this picture is an old one.
    pub(super) trouble: Option<String>,
}

/// Where the watcher looks: at which host and at which EMC, counted from the top.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) host: usize,
    pub(super) emc: usize,
}

/// How each state of a slice looks, in the order of a slice's life.
const STATES: &[(&str, char, Color)] = &[
    ("free", '.', Color::DarkGray),
    ("assigned", 'a', Color::Blue),
    ("onlining", 'o', Color::Cyan),
    ("online", 'O', Color::Green),
    ("draining", 'd', Color::Yellow),
    ("scrubbing", 's', Color::Magenta),
    ("quarantined", 'Q', Color::Red),
];

/// Alarms shown; the title counts them all.
const ALARMS_SHOWN: u16 = 5;

/// Draws it all, from top to bottom: the rack in one line, hosts, EMCs, alarms, keys.
pub(super) fn draw(frame: &mut Frame<'_>, picture: &Picture, seat: &Seat) {
    let alarms = u16::try_from(picture.rack.alarms.len()).unwrap_or(u16::MAX).clamp(1, ALARMS_SHOWN) + 2;
    let hosts = u16::try_from(picture.hosts.len()).unwrap_or(u16::MAX).min(frame.area().height / 3) + 3;
    let rows = [
        Constraint::Length(1),
        Constraint::Length(hosts),
        Constraint::Min(3),
        Constraint::Length(alarms),
        Constraint::Length(1),
    ];
    let [top, hosts, emcs, alarms, bottom] = Layout::vertical(rows).areas(frame.area());
    frame.render_widget(headline(picture), top);
    draw_hosts(frame, hosts, picture, seat);
    draw_emcs(frame, emcs, picture, seat);
    draw_alarms(frame, alarms, &picture.rack.alarms);
    frame.render_widget(legend(), bottom);
}

fn headline(picture: &Picture) -> Line<'_> {
    if let Some(trouble) = &picture.trouble {
        return Line::from(format!("old picture: {trouble}")).style(Style::new().fg(Color::Red).bold());
    }
    let r = &picture.rack;
    let text = format!(
        "rack {}  {} of {} slices free, {} wanted  revision {}.{}",
        r.rack_uuid, r.slices_free, r.slices, r.buffer_target, r.generation, r.revision
    );
    Line::from(text).bold()
}

fn draw_hosts(frame: &mut Frame<'_>, area: Rect, picture: &Picture, seat: &Seat) {
    let heads = ["HOST", "LEASE", "SCHEDULING", "CORES", "LOCAL", "SLICES", "VMS", "CAN GET"];
    let widths = [16, 9, 11, 9, 17, 7, 5, 8].map(Constraint::Length);
    let rows = picture.hosts.iter().map(|host| host_row(host, &picture.free));
    let table = Table::new(rows, widths)
        .header(Row::new(heads).bold())
        .row_highlight_style(Modifier::REVERSED)
        .block(Block::bordered().title(format!("hosts ({}), up and down", picture.hosts.len())));
    let mut state = TableState::new().with_selected(seat.host);
    frame.render_stateful_widget(table, area, &mut state);
}

fn host_row<'a>(host: &'a view::Host, free: &view::Capacity) -> Row<'a> {
    let now = free.hosts.iter().find(|h| h.host == host.host);
    let cores = now.map_or(host.free_cores, |h| h.free_cores);
    let local = now.map_or(host.free_local_bytes, |h| h.free_local_bytes);
    let can_get =
        now.map_or_else(|| "-".to_owned(), |h| h.emcs.iter().map(|e| e.free_slices).sum::<u32>().to_string());
    Row::new([
        Cell::from(host.host.as_str()),
        Cell::from(host.state.as_str()).style(Style::new().fg(lease(&host.state))),
        Cell::from(host.scheduling.as_str()),
        Cell::from(format!("{cores}/{}", host.cores)),
        Cell::from(format!("{}/{}", table::size(local), table::size(host.local_bytes))),
        Cell::from(host.slices.to_string()),
        Cell::from(host.reservations.to_string()),
        Cell::from(can_get),
    ])
}

fn lease(state: &str) -> Color {
    match state {
        "up" => Color::Green,
        "silent" | "expected" => Color::Yellow,
        _ => Color::Red,
    }
}

/// EMCs from the chosen one on; each a line of counts and then its slices. Those of the chosen host are underlined.
fn draw_emcs(frame: &mut Frame<'_>, area: Rect, picture: &Picture, seat: &Seat) {
    let block = Block::bordered().title(format!("EMCs ({}), left and right", picture.emcs.len()));
    let inside = block.inner(area);
    let host = picture.hosts.get(seat.host).map(|h| h.host.as_str());
    let lines =
        picture.emcs.iter().skip(seat.emc).flat_map(|emc| emc_lines(emc, picture, host, inside.width));
    let lines: Vec<_> = lines.take(usize::from(inside.height)).collect();
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn emc_lines<'a>(emc: &'a view::Emc, picture: &'a Picture, host: Option<&str>, width: u16) -> Vec<Line<'a>> {
    let letters: Vec<_> = picture
        .slices
        .iter()
        .filter(|s| s.emc == emc.emc)
        .map(|s| letter(s, host.is_some() && s.host.as_deref() == host))
        .collect();
    let rows = letters.chunks(usize::from(width).max(1)).map(|row| Line::from(row.to_vec()));
    std::iter::once(emc_head(emc)).chain(rows).collect()
}

fn emc_head(emc: &view::Emc) -> Line<'_> {
    let text = format!(
        "{}  {} {}  {}/{} free, {} in use, {} draining, {} quarantined",
        emc.emc, emc.state, emc.scheduling, emc.free, emc.slices, emc.in_use, emc.draining, emc.quarantined
    );
    let colour = if emc.state == "failed" { Color::Red } else { Color::Reset };
    Line::from(text).style(Style::new().fg(colour).bold())
}

fn letter(slice: &view::Slice, chosen: bool) -> Span<'static> {
    let known = STATES.iter().find(|(state, ..)| *state == slice.state);
    let (letter, colour) = known.map_or(('?', Color::Red), |(_, letter, colour)| (*letter, *colour));
    let style = Style::new().fg(colour);
    Span::styled(letter.to_string(), if chosen { style.underlined() } else { style })
}

fn draw_alarms(frame: &mut Frame<'_>, area: Rect, alarms: &[view::Alarm]) {
    let block = Block::bordered().title(format!("alarms ({})", alarms.len()));
    let lines: Vec<_> = if alarms.is_empty() {
        vec![Line::from("none").fg(Color::Green)]
    } else {
        alarms.iter().take(usize::from(ALARMS_SHOWN)).map(alarm_line).collect()
    };
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn alarm_line(alarm: &view::Alarm) -> Line<'_> {
    Line::from(format!(
        "{}  {} {}: {}",
        table::moment(alarm.since_unix_ms),
        alarm.reason,
        alarm.subject,
        alarm.message
    ))
    .fg(Color::Red)
}

fn legend() -> Line<'static> {
    let states = STATES.iter().flat_map(|(state, letter, colour)| {
        [Span::styled(letter.to_string(), Style::new().fg(*colour)), Span::raw(format!(" {state}  "))]
    });
    Line::from_iter([Span::raw("q leave | ")].into_iter().chain(states))
}

#[cfg(test)]
pub(super) mod tests {
    use proto::v1;
    use ratatui::{Terminal, backend::TestBackend, buffer::Buffer};

    use super::*;

    /// Two hosts, two EMCs, a slice in each state.
    pub(in crate::top) fn rack() -> Picture {
        let host = |name: &str, state| v1::Host {
            host: name.into(),
            state,
            scheduling: 1,
            cores: 32,
            free_cores: 8,
            local_bytes: 64 << 30,
            free_local_bytes: 16 << 30,
            slices: 2,
            reservations: 1,
            ..Default::default()
        };
        let emc = |name: &str, state| v1::Emc {
            emc: name.into(),
            state,
            scheduling: 1,
            slices: 7,
            free: 1,
            ..Default::default()
        };
        let slice = |n: u32, emc: &str, state| {
            let host = (state != 1).then(|| "h1".to_owned());
            v1::Slice { slice: n, emc: emc.into(), state, host, ..Default::default() }
        };
        let mut slices: Vec<view::Slice> = (1..=7).map(|state| slice(0, "e0", state).into()).collect();
        slices.push(slice(7, "e1", 1).into());
        Picture {
            rack: v1::Rack {
                rack_uuid: "u-1".into(),
                slices: 8,
                slices_free: 2,
                buffer_target: 1,
                ..Default::default()
            }
            .into(),
            hosts: vec![host("h1", 1).into(), host("h2", 3).into()],
            emcs: vec![emc("e0", 1).into(), emc("e1", 2).into()],
            slices,
            free: v1::Capacity::default().into(),
            trouble: None,
        }
    }

    fn drawn(picture: &Picture, seat: &Seat) -> Buffer {
        let mut terminal = Terminal::new(TestBackend::new(100, 24)).unwrap();
        terminal.draw(|frame| draw(frame, picture, seat)).unwrap();
        terminal.backend().buffer().clone()
    }

    fn text(buffer: &Buffer) -> String {
        let row = |y| {
            (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned()
        };
        (0..buffer.area.height).map(row).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_rack_is_one_picture() {
        assert_eq!(
            text(&drawn(&rack(), &Seat::default())),
            include_str!("picture.txt").trim_end_matches('\n')
        );
    }

    #[test]
    fn every_state_of_a_slice_has_a_letter_and_a_colour_of_its_own() {
        let mut states: Vec<_> = (1..=7).filter_map(|n| v1::SliceState::try_from(n).ok()).collect();
        states.dedup();
        assert_eq!(states.len(), STATES.len());
        let letters: std::collections::BTreeSet<_> = STATES.iter().map(|(_, letter, _)| letter).collect();
        assert_eq!(letters.len(), STATES.len());
        let shown = text(&drawn(&rack(), &Seat::default()));
        assert!(shown.contains(".aoOdsQ") && !shown.contains('?'), "{shown}");
    }

    #[test]
    fn a_silent_host_and_a_quarantined_slice_are_red() {
        let buffer = drawn(&rack(), &Seat { host: 1, emc: 0 });
        let at = |wanted: &str| {
            let lines = text(&buffer);
            let (y, line) = lines.lines().enumerate().find(|(_, line)| line.contains(wanted)).unwrap();
            let x = line[..line.find(wanted).unwrap()].chars().count();
            buffer[(u16::try_from(x).unwrap(), u16::try_from(y).unwrap())].fg
        };
        assert_eq!(at("unknown"), Color::Red);
        assert_eq!(at("Q"), Color::Red);
        assert_eq!(at("OdsQ"), Color::Green);
    }

    #[test]
    fn an_old_picture_says_that_it_is_old() {
        let picture = Picture { trouble: Some("no answer".into()), ..rack() };
        assert!(text(&drawn(&picture, &Seat::default())).starts_with("old picture: no answer"));
    }

    #[test]
    fn a_picture_fits_into_any_terminal() {
        for (width, height) in [(1, 1), (20, 3), (80, 10), (300, 100)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| draw(frame, &rack(), &Seat { host: 9, emc: 9 })).unwrap();
        }
    }
}
