//! Tenants that change what they do while they run (Spirit's figure 9): four share a host, and two of them turn from one trace to another and back.
//!
//! Nothing here is known beforehand. Each tenant plays its trace, over and over, against local memory that keeps what was touched last; a miss takes as long
//! as its share of the link makes it. At the end of an epoch it is decided as on a host, by what was seen of reuse in this epoch, who has how much in the next.
//! Beside it, whatever a tenant touches is played with an equal split too.

use std::sync::Arc;

use fairness::{
    curve::Knot,
    epoch::{EpochAllocator, Member},
    market::{Bundle, Share},
    profile::{MissModel as _, ReuseDistances},
};

use super::{
    host::{Host, part},
    lru::Lru,
    mixes::GAMMA,
    tenant::{WATCHED, throughput},
};

/// A trace that is played.
#[derive(Clone, Debug)]
pub struct Activity {
    /// The trace's name.
    pub name: String,
    /// Blocks in the order in which they are touched, numbered from 0.
    touches: Arc<[u32]>,
    /// How many blocks there are.
    blocks: u32,
    /// Pages of a block, which are touched with it, one after the other.
    pages: u32,
}

/// A tenant begins to do something else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// With this epoch; the first is 0.
    pub epoch: usize,
    /// Which, from 0.
    pub tenant: usize,
    /// The activity.
    pub to: usize,
}

/// Those of Spirit's experiment, in fewer epochs: at first all play the first activity.
pub const CHANGES: [Change; 4] = [
    Change { epoch: 8, tenant: 0, to: 1 },
    Change { epoch: 16, tenant: 1, to: 1 },
    Change { epoch: 24, tenant: 0, to: 0 },
    Change { epoch: 32, tenant: 1, to: 0 },
];
/// Who share, and for how long.
pub const TENANTS: usize = 4;
/// Epochs that are played.
pub const EPOCHS: usize = 40;
/// Times that the first activity, with an equal split, plays its trace in an epoch: what is seen of a shorter one hangs on which part of a trace it is.
const PASSES: usize = 4;
/// Epochs after a change within which shares are to have followed: in the first nobody knows of it.
pub const FOLLOWED_WITHIN: usize = 2;
/// How far off a share may be that has followed.
const OFF: f64 = 0.05;

/// What one epoch was like.
#[derive(Clone, Debug)]
pub struct Epoch {
    /// Of each tenant.
    pub tenants: Vec<Played>,
}

/// What a tenant had in an epoch, and what came of it.
#[derive(Clone, Copy, Debug)]
pub struct Played {
    /// The activity.
    pub does: usize,
    /// Parts of all memory and of the link.
    pub share: Bundle,
    /// Of touches, those that missed local memory.
    pub misses: f64,
    /// 1 is never slowed down.
    pub throughput: f64,
    /// Of the same touches with an equal split.
    pub of_equal_split: f64,
}

impl Activity {
    /// Two traces of tenants that have about as many pages: blocks of the one with fewer are larger.
    pub fn pair(traces: [(String, Vec<u32>); 2]) -> [Self; 2] {
        let blocks = |touches: &[u32]| touches.iter().max().map_or(1, |last| last + 1);
        let most = traces.iter().map(|(_, touches)| blocks(touches)).max().unwrap_or(1);
        traces.map(|(name, touches)| {
            let blocks = blocks(&touches);
            let pages = (f64::from(most) / f64::from(blocks)).round();
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "fewer than all pages"
            )]
            let pages = pages as u32;
            Self { name, touches: touches.into(), blocks, pages }
        })
    }

    fn footprint(&self) -> u32 {
        self.blocks * self.pages
    }
}

/// Plays all epochs, with memory for such a part of what tenants touch.
///
/// # Panics
/// Nothing is touched, or there is less than a page for everybody.
pub fn play(activities: &[Activity; 2], memory: f64, changes: &[Change]) -> Vec<Epoch> {
    let host = Host { memory: memory * TENANTS as f64 };
    let mut world = World::new(activities, host);
    let mut epochs = EpochAllocator::default();
    let epoch = |epoch: usize| {
        for change in changes.iter().filter(|change| change.epoch == epoch) {
            world.players[change.tenant].does = change.to;
        }
        let tenants = world.epoch();
        world.deal(&mut epochs);
        Epoch { tenants }
    };
    (0..EPOCHS).map(epoch).collect()
}

/// A host and those that run on it.
struct World<'a> {
    activities: &'a [Activity; 2],
    host: Host,
    /// Pages that tenants have: of the activity that touches more.
    footprint: f64,
    /// How long an epoch is, in touches that hit.
    length: f64,
    players: Vec<Player>,
}

/// A tenant that runs.
#[derive(Clone)]
struct Player {
    does: usize,
    /// Where it is in each trace.
    at: [usize; 2],
    local: Lru,
    /// Local memory of an equal split.
    equal: Lru,
    seen: ReuseDistances,
    /// In footprints, and of the link.
    share: Bundle,
    /// What it took in the last epoch beyond its end.
    late: f64,
}

impl<'a> World<'a> {
    fn new(activities: &'a [Activity; 2], host: Host) -> Self {
        let pages: u32 = activities.iter().map(Activity::footprint).sum();
        let footprint = f64::from(activities.iter().map(Activity::footprint).max().unwrap_or(1));
        let share = host.equal(TENANTS);
        let mut equal = Lru::new(pages);
        equal.resize(room(share, footprint));
        // Those that do the same are elsewhere in it.
        let begins = |tenant: usize| activities.each_ref().map(|one| one.touches.len() * tenant / TENANTS);
        let player = |tenant: usize| Player {
            does: 0,
            at: begins(tenant),
            local: equal.clone(),
            equal: equal.clone(),
            seen: ReuseDistances::new(WATCHED, 1.0),
            share,
            late: 0.0,
        };
        let players: Vec<Player> = (0..TENANTS).map(player).collect();
        let mut one = players[0].clone();
        let touches = PASSES * activities[0].touches.len();
        let length = (0..touches).map(|_| one.touch(activities, share).time).sum();
        Self { activities, host, footprint, length, players }
    }

    fn epoch(&mut self) -> Vec<Played> {
        let Self { activities, host, footprint, length, players } = self;
        players.iter_mut().map(|player| player.epoch(activities, *host, *footprint, *length)).collect()
    }

    /// What everybody gets for the next epoch.
    fn deal(&mut self, epochs: &mut EpochAllocator) {
        let member = |(at, player): (usize, &Player)| {
            let knots = player.seen.knots().into_iter();
            let knots = knots.map(|knot| Knot { memory: knot.memory / self.footprint, ..knot }).collect();
            let utility = self.host.worth(knots, GAMMA, 1.0);
            Member { name: at.to_string().into(), weight: 1.0, min: Share::default(), utility }
        };
        let members: Vec<_> = self.players.iter().enumerate().map(member).collect();
        let decision = epochs.decide(self.host.supply(), &members);
        let decision = decision.expect("tenants with equal weights and without limits");
        for (player, share) in self.players.iter_mut().zip(&decision.shares) {
            player.share = part(share);
        }
    }
}

/// What touching a block came to.
#[derive(Clone, Copy, Default)]
struct Touched {
    pages: u32,
    missed: u32,
    time: f64,
    /// With an equal split.
    equal_time: f64,
}

/// Pages for which a share has room.
fn room(share: Bundle, footprint: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "pages of a tenant")]
    let room = (share.memory * footprint) as usize;
    room
}

impl Player {
    fn epoch(&mut self, activities: &[Activity; 2], host: Host, footprint: f64, length: f64) -> Played {
        self.local.resize(room(self.share, footprint));
        // What was touched last is remembered, not how often what was reused.
        self.seen.decay(0.0);
        let (mut time, mut equal_time) = (self.late, 0.0);
        let (mut pages, mut missed) = (0_u64, 0_u64);
        let begun = time;
        while time < length {
            let touched = self.touch(activities, host.equal(TENANTS));
            pages += u64::from(touched.pages);
            missed += u64::from(touched.missed);
            time += touched.time;
            equal_time += touched.equal_time;
        }
        self.late = time - length;
        Played {
            does: self.does,
            share: Bundle { memory: self.share.memory / host.memory, ..self.share },
            misses: missed as f64 / pages.max(1) as f64,
            throughput: pages as f64 / (time - begun),
            of_equal_split: pages as f64 / equal_time,
        }
    }

    /// Touches the next block of its trace.
    fn touch(&mut self, activities: &[Activity; 2], equal: Bundle) -> Touched {
        let activity = &activities[self.does];
        let at = &mut self.at[self.does];
        let block = activity.touches[*at];
        *at = (*at + 1) % activity.touches.len();
        let others: u32 = activities[..self.does].iter().map(Activity::footprint).sum();
        let first = others + block * activity.pages;
        let (mut missed, mut equal_missed) = (0, 0);
        for page in first..first + activity.pages {
            self.seen.touch(u64::from(page));
            missed += u32::from(!self.local.touch(page));
            equal_missed += u32::from(!self.equal.touch(page));
        }
        let pages = f64::from(activity.pages);
        let time = |missed: u32, share: Bundle| {
            pages / throughput(f64::from(missed) / pages, GAMMA, 1.0, share.bandwidth)
        };
        Touched {
            pages: activity.pages,
            missed,
            time: time(missed, self.share),
            equal_time: time(equal_missed, equal),
        }
    }
}

/// How shares followed a change.
#[derive(Clone, Copy, Debug)]
pub struct Followed {
    /// Of what.
    pub change: Change,
    /// Its tenant's share just before.
    pub before: Bundle,
    /// And two epochs later.
    pub soon: Bundle,
    /// And in the mean from then until something else changes, or all ends.
    pub long_run: Bundle,
    /// Epochs from the change to the first in which the share is what it is in the long run, but for 5 % of that or of an equal share; none if it never is.
    pub epochs: Option<usize>,
    /// The most by which it is off in any epoch from two epochs later on: traces are not the same all along.
    pub wanders: f64,
}

impl Followed {
    /// Whether two epochs later the share is what it is in the long run, but for 5 % of that or of an equal share.
    pub fn is_soon_there(&self) -> bool {
        off(self.soon, self.long_run) <= OFF
    }
}

/// How far off a share is, of what it is in the long run or of an equal share, if that is more; of memory or of bandwidth, whichever is further off.
fn off(share: Bundle, long_run: Bundle) -> f64 {
    let one = |share: f64, run: f64| (share - run).abs() / run.max(1.0 / TENANTS as f64);
    one(share.memory, long_run.memory).max(one(share.bandwidth, long_run.bandwidth))
}

/// How they followed each.
///
/// # Panics
/// Changes are too close to each other, or to the end, for shares to follow.
pub fn followed(epochs: &[Epoch], changes: &[Change]) -> Vec<Followed> {
    let until = |from: usize| {
        let later = changes.iter().map(|change| change.epoch).filter(|epoch| *epoch > from);
        later.min().unwrap_or(epochs.len())
    };
    changes.iter().map(|change| follows(epochs, *change, until(change.epoch))).collect()
}

fn follows(epochs: &[Epoch], change: Change, until: usize) -> Followed {
    let share = |epoch: usize| epochs[epoch].tenants[change.tenant].share;
    let soon = change.epoch + FOLLOWED_WITHIN;
    assert!(soon < until, "{change:?}: shares have no time to follow before epoch {until}");
    let mean = |good: fn(Bundle) -> f64| {
        (soon..until).map(|epoch| good(share(epoch))).sum::<f64>() / (until - soon) as f64
    };
    let long_run = Bundle { memory: mean(|share| share.memory), bandwidth: mean(|share| share.bandwidth) };
    let off = |epoch: usize| off(share(epoch), long_run);
    Followed {
        change,
        before: share(change.epoch.saturating_sub(1)),
        soon: share(soon),
        long_run,
        epochs: (0..until - change.epoch).find(|later| off(change.epoch + later) <= OFF),
        wanders: (soon..until).map(off).fold(0.0, f64::max),
    }
}
