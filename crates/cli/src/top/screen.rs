//! Drawing of the live view from a snapshot: hosts, tenants of the selected host, VMs that pool memory may
//! slow down, alarms, and EMCs with a coloured letter for every slice.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize as _},
    text::{Line, Span},
    widgets::{Block, Cell, Paragraph, Row, Table, TableState},
};

use crate::{
    table::{self, mib},
    tenants::{Tenant, Tenants},
    view,
};

/// State of the rack at one time.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) rack: view::Rack,
    pub(super) hosts: Vec<view::Host>,
    pub(super) emcs: Vec<view::Emc>,
    pub(super) slices: Vec<view::Slice>,
    /// VMs with the verdict watch or migrate, the latter first.
    pub(super) suspects: Vec<view::Vm>,
    pub(super) free: view::Capacity,
    /// Tenants of the selected host; `None` if it does not report any.
    pub(super) tenants: Option<Tenants>,
    /// Error of the last poll; `None` if the snapshot is up to date.
    pub(super) error: Option<String>,
}

/// Indexes of the selected host and EMC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Selection {
    pub(super) host: usize,
    pub(super) emc: usize,
}

/// Letter and colour of each slice state, in the order of the legend.
const SLICE_STATE_STYLES: &[(&str, char, Color)] = &[
    ("free", '.', Color::DarkGray),
    ("assigned", 'a', Color::Blue),
    ("onlining", 'o', Color::Cyan),
    ("online", 'O', Color::Green),
    ("draining", 'd', Color::Yellow),
    ("scrubbing", 's', Color::Magenta),
    ("quarantined", 'Q', Color::Red),
];

/// Maximum number of alarms that are shown. The title contains the total number.
const ALARMS_SHOWN_MAX: u16 = 5;

/// Maximum number of VMs that are shown. The title contains the total number.
const SUSPECTS_SHOWN_MAX: u16 = 5;

/// Maximum number of tenants that are shown. The title contains the total number.
const TENANTS_SHOWN_MAX: u16 = 6;

/// Draws a summary of the rack, the hosts, the tenants of the selected host (if any), the VMs that pool
/// memory may slow down (if any), the EMCs, the alarms and a legend, from top to bottom.
pub(super) fn draw(frame: &mut Frame<'_>, snapshot: &Snapshot, selection: &Selection) {
    let alarms = u16::try_from(snapshot.rack.alarms.len()).unwrap_or(u16::MAX).clamp(1, ALARMS_SHOWN_MAX) + 2;
    let hosts = u16::try_from(snapshot.hosts.len()).unwrap_or(u16::MAX).min(frame.area().height / 3) + 3;
    let suspects = match u16::try_from(snapshot.suspects.len()).unwrap_or(u16::MAX) {
        0 => 0,
        count => count.min(SUSPECTS_SHOWN_MAX) + 3,
    };
    let tenants = snapshot.tenants.as_ref().map_or(0, |tenants| {
        u16::try_from(tenants.tenants.len()).unwrap_or(u16::MAX).min(TENANTS_SHOWN_MAX) + 3
    });
    let rows = [
        Constraint::Length(1),
        Constraint::Length(hosts),
        Constraint::Length(tenants),
        Constraint::Length(suspects),
        Constraint::Min(3),
        Constraint::Length(alarms),
        Constraint::Length(1),
    ];
    let [top, hosts, tenants, suspects, emcs, alarms, bottom] = Layout::vertical(rows).areas(frame.area());
    frame.render_widget(headline(snapshot), top);
    draw_hosts(frame, hosts, snapshot, selection);
    if let Some(shown) = &snapshot.tenants {
        draw_tenants(frame, tenants, shown);
    }
    draw_suspects(frame, suspects, &snapshot.suspects);
    draw_emcs(frame, emcs, snapshot, selection);
    draw_alarms(frame, alarms, &snapshot.rack.alarms);
    frame.render_widget(legend(), bottom);
}

fn headline(snapshot: &Snapshot) -> Line<'_> {
    if let Some(error) = &snapshot.error {
        return Line::from(format!("stale: {error}")).style(Style::new().fg(Color::Red).bold());
    }
    let r = &snapshot.rack;
    let text = format!(
        "rack {}  {} of {} slices free, target {}  revision {}.{}",
        r.rack_uuid, r.slices_free, r.slices, r.buffer_target, r.generation, r.revision
    );
    Line::from(text).bold()
}

fn draw_hosts(frame: &mut Frame<'_>, area: Rect, snapshot: &Snapshot, selection: &Selection) {
    let heads = ["HOST", "STATE", "SCHEDULING", "CORES", "LOCAL", "SLICES", "VMS", "POOL FREE"];
    let widths = [16, 9, 11, 9, 17, 7, 5, 9].map(Constraint::Length);
    let rows = snapshot.hosts.iter().map(|host| host_row(host, &snapshot.free));
    let table = Table::new(rows, widths)
        .header(Row::new(heads).bold())
        .row_highlight_style(Modifier::REVERSED)
        .block(Block::bordered().title(format!("hosts ({}), up/down", snapshot.hosts.len())));
    let mut state = TableState::new().with_selected(selection.host);
    frame.render_stateful_widget(table, area, &mut state);
}

fn host_row<'a>(host: &'a view::Host, free: &view::Capacity) -> Row<'a> {
    let now = free.hosts.iter().find(|h| h.host == host.host);
    let cores = now.map_or(host.free_cores, |h| h.free_cores);
    let local = now.map_or(host.free_local_bytes, |h| h.free_local_bytes);
    let pool_free =
        now.map_or_else(|| "-".to_owned(), |h| h.emcs.iter().map(|e| e.free_slices).sum::<u32>().to_string());
    Row::new([
        Cell::from(host.host.as_str()),
        Cell::from(host.state.as_str()).style(Style::new().fg(state_colour(&host.state))),
        Cell::from(host.scheduling.as_str()),
        Cell::from(format!("{cores}/{}", host.cores)),
        Cell::from(format!("{}/{}", table::size(local), table::size(host.local_bytes))),
        Cell::from(host.slices.to_string()),
        Cell::from(host.reservations.to_string()),
        Cell::from(pool_free),
    ])
}

fn state_colour(state: &str) -> Color {
    match state {
        "up" => Color::Green,
        "silent" | "expected" => Color::Yellow,
        _ => Color::Red,
    }
}

/// Draws the tenants with the most local memory.
fn draw_tenants(frame: &mut Frame<'_>, area: Rect, shown: &Tenants) {
    let heads = ["TENANT", "LOCAL", "SLOW", "PROTECTION", "BOUND", "PROMOTION", "THRASH LEVEL"];
    let widths = [24, 10, 10, 10, 10, 11, 12].map(Constraint::Length);
    let mut tenants: Vec<&Tenant> = shown.tenants.iter().collect();
    tenants.sort_by_key(|tenant| std::cmp::Reverse(tenant.local_bytes));
    let rows = tenants.into_iter().take(usize::from(TENANTS_SHOWN_MAX)).map(tenant_row);
    let reason = shown.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let (count, at) = (shown.tenants.len(), table::format_timestamp(shown.at_unix_ms));
    let title = format!("tenants of {} ({count}) at {at}{reason}", shown.host);
    let table = Table::new(rows, widths).header(Row::new(heads).bold()).block(Block::bordered().title(title));
    frame.render_widget(table, area);
}

fn tenant_row(tenant: &Tenant) -> Row<'_> {
    let level = Cell::from(tenant.thrash_level.to_string());
    let is_thrashing = tenant.thrash_level > 0;
    Row::new([
        Cell::from(tenant.tenant.as_str()),
        Cell::from(mib(tenant.local_bytes)),
        Cell::from(mib(tenant.slow_bytes)),
        Cell::from(mib(tenant.scaled_protection_bytes)),
        Cell::from(tenant.bound_bytes.map_or_else(|| "-".to_owned(), mib)),
        Cell::from(tenant.promotion_text()),
        if is_thrashing { level.style(Style::new().fg(Color::Yellow)) } else { level },
    ])
}

fn draw_suspects(frame: &mut Frame<'_>, area: Rect, vms: &[view::Vm]) {
    let heads = ["VM", "HOST", "VERDICT", "POOL", "LOSS", "ACCESSED"];
    let widths = [24, 16, 8, 8, 8, 8].map(Constraint::Length);
    let rows = vms.iter().take(usize::from(SUSPECTS_SHOWN_MAX)).map(suspect_row);
    let title = format!("VMs that pool memory may slow down ({})", vms.len());
    let table = Table::new(rows, widths).header(Row::new(heads).bold()).block(Block::bordered().title(title));
    frame.render_widget(table, area);
}

fn suspect_row(vm: &view::Vm) -> Row<'_> {
    let share = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), table::percent);
    let colour = if vm.verdict == "migrate" { Color::Red } else { Color::Yellow };
    Row::new([
        Cell::from(vm.vm.as_str()),
        Cell::from(vm.host.as_str()),
        Cell::from(vm.verdict.as_str()).style(Style::new().fg(colour)),
        Cell::from(table::size(vm.pool_bytes)),
        Cell::from(share(vm.loss)),
        Cell::from(share(vm.accessed_share)),
    ])
}

/// Draws the selected EMC and the following EMCs. Each EMC has a line of counts and then one letter
/// per slice. Slices of the selected host are underlined.
fn draw_emcs(frame: &mut Frame<'_>, area: Rect, snapshot: &Snapshot, selection: &Selection) {
    let block = Block::bordered().title(format!("EMCs ({}), left/right", snapshot.emcs.len()));
    let inside = block.inner(area);
    let host = snapshot.hosts.get(selection.host).map(|h| h.host.as_str());
    let lines =
        snapshot.emcs.iter().skip(selection.emc).flat_map(|emc| emc_lines(emc, snapshot, host, inside.width));
    let lines: Vec<_> = lines.take(usize::from(inside.height)).collect();
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn emc_lines<'a>(
    emc: &'a view::Emc,
    snapshot: &'a Snapshot,
    host: Option<&str>,
    width: u16,
) -> Vec<Line<'a>> {
    let letters: Vec<_> = snapshot
        .slices
        .iter()
        .filter(|s| s.emc == emc.emc)
        .map(|s| slice_letter(s, host.is_some() && s.host.as_deref() == host))
        .collect();
    let rows = letters.chunks(usize::from(width).max(1)).map(|row| Line::from(row.to_vec()));
    std::iter::once(emc_heading(emc)).chain(rows).collect()
}

fn emc_heading(emc: &view::Emc) -> Line<'_> {
    let text = format!(
        "{}  {} {}  {}/{} free, {} in use, {} draining, {} quarantined",
        emc.emc, emc.state, emc.scheduling, emc.free, emc.slices, emc.in_use, emc.draining, emc.quarantined
    );
    let colour = if emc.state == "failed" { Color::Red } else { Color::Reset };
    Line::from(text).style(Style::new().fg(colour).bold())
}

fn slice_letter(slice: &view::Slice, is_selected: bool) -> Span<'static> {
    let entry = SLICE_STATE_STYLES.iter().find(|(state, ..)| *state == slice.state);
    let (letter, colour) = entry.map_or(('?', Color::Red), |(_, letter, colour)| (*letter, *colour));
    let style = Style::new().fg(colour);
    Span::styled(letter.to_string(), if is_selected { style.underlined() } else { style })
}

fn draw_alarms(frame: &mut Frame<'_>, area: Rect, alarms: &[view::Alarm]) {
    let block = Block::bordered().title(format!("alarms ({})", alarms.len()));
    let lines: Vec<_> = if alarms.is_empty() {
        vec![Line::from("none").fg(Color::Green)]
    } else {
        alarms.iter().take(usize::from(ALARMS_SHOWN_MAX)).map(alarm_line).collect()
    };
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn alarm_line(alarm: &view::Alarm) -> Line<'_> {
    Line::from(format!(
        "{}  {} {}: {}",
        table::format_timestamp(alarm.since_unix_ms),
        alarm.reason,
        alarm.subject,
        alarm.message
    ))
    .fg(Color::Red)
}

fn legend() -> Line<'static> {
    let states = SLICE_STATE_STYLES.iter().flat_map(|(state, letter, colour)| {
        [Span::styled(letter.to_string(), Style::new().fg(*colour)), Span::raw(format!(" {state}  "))]
    });
    Line::from_iter([Span::raw("q quit | ")].into_iter().chain(states))
}

#[cfg(test)]
pub(super) mod tests {
    use proto::v1;
    use ratatui::{Terminal, backend::TestBackend, buffer::Buffer};

    use super::*;

    /// Returns a snapshot with two hosts and two EMCs. The first EMC has a slice in each state.
    pub(in crate::top) fn sample_snapshot() -> Snapshot {
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
        Snapshot {
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
            suspects: Vec::new(),
            free: v1::Capacity::default().into(),
            tenants: None,
            error: None,
        }
    }

    /// Returns two tenants of a host.
    pub(in crate::top) fn sample_tenants(host: &str) -> Tenants {
        let tenant = |tenant: &str, mib: u64, bound_bytes, thrash_level| v1::TieredTenant {
            tenant: tenant.into(),
            local_bytes: mib << 20,
            slow_bytes: 7 << 20,
            scaled_protection_bytes: 80 << 20,
            bound_bytes,
            thrash_level,
            ..Default::default()
        };
        let tenants = vec![tenant("db", 50, None, 0), tenant("web", 120, Some(130 << 20), 2)];
        v1::Tenants { host: host.into(), tenants, ..Default::default() }.into()
    }

    fn draw_to_buffer(snapshot: &Snapshot, selection: &Selection) -> Buffer {
        let mut terminal = Terminal::new(TestBackend::new(100, 24)).unwrap();
        terminal.draw(|frame| draw(frame, snapshot, selection)).unwrap();
        terminal.backend().buffer().clone()
    }

    fn buffer_text(buffer: &Buffer) -> String {
        let row = |y| {
            (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned()
        };
        (0..buffer.area.height).map(row).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn sample_snapshot_is_drawn_as_in_the_text_file() {
        assert_eq!(
            buffer_text(&draw_to_buffer(&sample_snapshot(), &Selection::default())),
            include_str!("screen.txt").trim_end_matches('\n')
        );
    }

    #[test]
    fn suspects_are_listed_between_hosts_and_emcs() {
        let vm = |vm: &str, verdict, loss| {
            let monitoring =
                v1::Monitoring { verdict, loss, accessed_share: Some(0.5), ..Default::default() };
            let vm = v1::Reservation {
                vm: vm.into(),
                host: "h1".into(),
                pool_bytes: 2 << 30,
                monitoring: Some(monitoring),
                ..Default::default()
            };
            view::Vm::from(vm)
        };
        let suspects = vec![vm("db", 3, Some(0.12)), vm("web", 2, None)];
        let shown =
            buffer_text(&draw_to_buffer(&Snapshot { suspects, ..sample_snapshot() }, &Selection::default()));
        let lines: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
        let at = |words: &[&str]| lines.iter().position(|line| line.starts_with(words)).unwrap();
        assert!(shown.contains("VMs that pool memory may slow down (2)"), "{shown}");
        let db = at(&["│db", "h1", "migrate", "2GiB", "12.0", "%", "50.0", "%"]);
        let web = at(&["│web", "h1", "watch", "2GiB", "-", "50.0", "%"]);
        assert!(at(&["│h2"]) < db && db < web && web < at(&["│e0"]), "{shown}");
    }

    #[test]
    fn tenants_are_listed_between_hosts_and_emcs_the_largest_first() {
        let mut tenants = sample_tenants("h1");
        let draw = |tenants| {
            let snapshot = Snapshot { tenants: Some(tenants), ..sample_snapshot() };
            buffer_text(&draw_to_buffer(&snapshot, &Selection::default()))
        };
        let shown = draw(tenants.clone());
        let lines: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
        let at = |words: &[&str]| lines.iter().position(|line| line.starts_with(words)).unwrap();
        assert!(shown.contains("tenants of h1 (2) at 1970-01-01T00:00:00Z─"), "{shown}");
        let web = at(&["│web", "120MiB", "7MiB", "80MiB", "130MiB", "unlimited", "2"]);
        let db = at(&["│db", "50MiB", "7MiB", "80MiB", "-", "unlimited", "0"]);
        assert!(at(&["│h2"]) < web && web < db && db < at(&["│e0"]), "{shown}");
        (tenants.tenants, tenants.reason) = (Vec::new(), Some("no slice is online".to_owned()));
        assert!(draw(tenants).contains("(0) at 1970-01-01T00:00:00Z: no slice is online"));
    }

    #[test]
    fn slice_states_have_unique_letters() {
        let mut states: Vec<_> = (1..=7).filter_map(|n| v1::SliceState::try_from(n).ok()).collect();
        states.dedup();
        assert_eq!(states.len(), SLICE_STATE_STYLES.len());
        let letters: std::collections::BTreeSet<_> =
            SLICE_STATE_STYLES.iter().map(|(_, letter, _)| letter).collect();
        assert_eq!(letters.len(), SLICE_STATE_STYLES.len());
        let shown = buffer_text(&draw_to_buffer(&sample_snapshot(), &Selection::default()));
        assert!(shown.contains(".aoOdsQ") && !shown.contains('?'), "{shown}");
    }

    #[test]
    fn unknown_host_and_quarantined_slice_are_red() {
        let buffer = draw_to_buffer(&sample_snapshot(), &Selection { host: 1, emc: 0 });
        let colour_of = |part: &str| {
            let lines = buffer_text(&buffer);
            let (y, line) = lines.lines().enumerate().find(|(_, line)| line.contains(part)).unwrap();
            let x = line[..line.find(part).unwrap()].chars().count();
            buffer[(u16::try_from(x).unwrap(), u16::try_from(y).unwrap())].fg
        };
        assert_eq!(colour_of("unknown"), Color::Red);
        assert_eq!(colour_of("Q"), Color::Red);
        assert_eq!(colour_of("OdsQ"), Color::Green);
    }

    #[test]
    fn stale_snapshot_is_drawn_with_the_error() {
        let snapshot = Snapshot { error: Some("no answer".into()), ..sample_snapshot() };
        assert!(
            buffer_text(&draw_to_buffer(&snapshot, &Selection::default())).starts_with("stale: no answer")
        );
    }

    #[test]
    fn view_can_be_drawn_in_any_terminal_size() {
        for (width, height) in [(1, 1), (20, 3), (80, 10), (300, 100)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| draw(frame, &sample_snapshot(), &Selection { host: 9, emc: 9 })).unwrap();
        }
    }
}
