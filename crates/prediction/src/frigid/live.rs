//! What can be said of VMs that start, from outcomes so far and a model; kept up to date as VMs end. A trial over the past and a manager
//! that serves use the same, so that what was measured is what is served.

use serde::{Deserialize, Serialize};
use units::Bytes;

use super::{
    history::{FEATURES, History},
    model::Model,
    outcome::{Ask, Outcome},
    price::{Calibration, Judged},
    risk::{Appetite, Curve, Stake},
};

/// Outcomes, a model if there is one, and how far it can be trusted.
#[derive(Clone, Debug, Default)]
pub struct Live {
    history: History,
    model: Option<Model>,
    calibration: Calibration,
}

/// What is known of a VM that is to start.
#[derive(Clone, Debug, PartialEq)]
pub struct Known {
    /// As numbers; NaN where nothing is known.
    pub features: [f64; FEATURES],
    /// What the model says of it, if there is one.
    pub said: Option<Said>,
}

/// What a model says of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Said {
    /// How likely each share of its memory is to be too much.
    pub curve: Curve,
    /// How much likelier it is for VMs of its owner, by what came of those; 1 or more.
    pub caution: f64,
}

impl Said {
    /// The share that is worth its risk.
    pub fn stake(&self, requested: Bytes, appetite: Appetite) -> Stake {
        self.curve.stake(requested, appetite, self.caution)
    }

    /// With what came of the VM that it was said of.
    pub fn judged(self, ask: &Ask, outcome: &Outcome) -> Judged {
        let Self { curve, caution } = self;
        let (begins, requested, untouched) = (ask.begins, ask.requested, outcome.untouched);
        Judged { begins, curve, caution, requested, untouched }
    }
}

impl Live {
    /// What is known of a VM that is to start now.
    pub fn know(&self, ask: &Ask) -> Known {
        let features = self.history.features(ask);
        let said = self.model.as_ref().map(|model| Said {
            curve: model.curve(&features),
            caution: self.calibration.caution(ask.groups.owner().as_ref()),
        });
        Known { features, said }
    }

    /// A VM has ended. What the model said of it before it began, if that was this model, shows how far it can be trusted.
    pub fn end(&mut self, ask: &Ask, outcome: &Outcome, said: Option<Said>) {
        self.history.add(ask, outcome);
        if let Some(said) = said {
            self.calibration.add(ask.groups.owner(), said.judged(ask, outcome));
        }
    }

    /// All outcomes anew: those that are too old are in it no more.
    pub fn set_history(&mut self, history: History) {
        self.history = history;
    }

    /// The model that speaks.
    pub(super) fn model(&self) -> Option<&Model> {
        self.model.as_ref()
    }

    /// Another model speaks from now on.
    pub(super) fn set_model(&mut self, model: Model) {
        self.model = Some(model);
    }

    /// No model speaks any more.
    pub fn forget_model(&mut self) {
        self.model = None;
        self.calibration = Calibration::default();
    }

    /// Another model speaks from now on, with outcomes that it was held against.
    pub fn adopt(&mut self, model: Model, calibration: Calibration) {
        self.model = Some(model);
        self.calibration = calibration;
    }

    /// Outcomes that the model was held against.
    pub fn calibration(&self) -> &Calibration {
        &self.calibration
    }
}
