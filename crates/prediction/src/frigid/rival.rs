//! Ways to forecast that ours has to beat (Pond 6.4.2 and figure 10c): the paper's own, a fixed share, and rules that people use. Each
//! is told what ours is told, when ours is told it; that they are, is the trial's to see to.

use units::Fraction;

use super::{
    history::{FEATURES, alike, lowest},
    outcome::Groups,
    risk::{Curve, LEVELS},
    score::{Score, Sum},
    trial::Stay,
};

/// A way to forecast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Ours: trees and margins, at one price of risk for all, which outcomes of late decide.
    Ours,
    /// The trees' quantile at the rate asked for, of each VM: the paper's.
    Trees,
    /// A fixed share for all: what all but the rate asked for of the VMs learnt from left untouched.
    Fixed,
    /// The least that any VM of the narrowest group that is known left untouched, less so many points.
    Lowest,
    /// The same, of the VM's owner: its customer, or else itself.
    LowestOfOwner,
}

/// What a way bought at each of its settings, the most careful last or first.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Which way.
    pub way: Way,
    /// In the order of settings.
    pub scores: Vec<Score>,
}

/// Points that rules take off the lowest share so far.
const LESS: [f64; 12] = [0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.4];

/// One way at one setting: a rate of overpredictions, or points that are taken off.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rival {
    way: Way,
    setting: f64,
    sum: Sum,
}

impl Rival {
    /// All of them. Ours and a fixed share are the trial's own.
    pub fn all(rates: &[Fraction]) -> Vec<Self> {
        let rival = |way, setting| Self { way, setting, sum: Sum::default() };
        let trees = rates.iter().map(|rate| rival(Way::Trees, rate.get()));
        let rules = [Way::Lowest, Way::LowestOfOwner];
        trees.chain(rules.into_iter().flat_map(|way| LESS.map(|less| rival(way, less)))).collect()
    }

    /// Forecasts a VM from what was known when it began and what trees said then, and holds it against what came of it. Of what is
    /// unknown, nothing is taken.
    pub fn test(&mut self, stay: &Stay, known: &[f64; FEATURES], trees: Option<Curve>) {
        let less = |lowest: f64| lowest - self.setting;
        let share = match self.way {
            Way::Trees => LEVELS
                .iter()
                .rposition(|level| *level <= self.setting)
                .and_then(|level| Some(trees?.at_level(level))),
            Way::Lowest => alike(known).map(|(_, _, lowest)| less(lowest)),
            Way::LowestOfOwner => lowest(known, owner(&stay.ask.groups)).map(less),
            Way::Ours | Way::Fixed => None,
        };
        let share = Fraction::new(share.unwrap_or_default().max(0.0)).expect("shares less something");
        self.sum.add(share, stay);
    }

    /// What each way bought, setting by setting.
    pub fn lines(rivals: &[Self]) -> impl Iterator<Item = Line> {
        let ways = rivals.chunk_by(|one, next| one.way == next.way);
        ways.map(|way| Line { way: way[0].way, scores: way.iter().map(|rival| rival.sum.score()).collect() })
    }
}

/// Which group is the owner's, as [`Groups::owner`] has it.
fn owner(groups: &Groups) -> usize {
    usize::from(!groups.key.is_empty())
}
