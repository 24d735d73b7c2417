//! Online predictor: predicts VMs that are about to start from a model and the outcomes so far, and
//! is updated as VMs end. The backtest and the pool manager use the same predictor, so the backtest
//! measures exactly what is served.

use serde::{Deserialize, Serialize};
use units::Bytes;

use super::{
    calibration::{Calibration, CalibrationSample},
    history::{FEATURES, History},
    model::Model,
    outcome::{Outcome, VmRequest},
    risk::{Curve, RiskAllocation, RiskLimit},
};

/// Outcome history, the serving model if there is one, and its calibration.
#[derive(Clone, Debug, Default)]
pub struct OnlinePredictor {
    history: History,
    model: Option<Model>,
    calibration: Calibration,
}

/// Features and prediction of a VM that is about to start.
#[derive(Clone, Debug, PartialEq)]
pub struct VmAssessment {
    /// Features; NaN where unknown.
    pub features: [f64; FEATURES],
    /// Prediction of the serving model, if there is one.
    pub prediction: Option<RiskPrediction>,
}

/// Prediction of a model for one VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RiskPrediction {
    /// Untouched share of the VM's memory, by quantile level.
    pub curve: Curve,
    /// Factor by which the VMs of this owner were overpredicted more often than predicted; at least
    /// 1.
    #[serde(rename = "caution")]
    pub owner_margin: f64,
}

impl RiskPrediction {
    /// Chooses the share of memory to take under a risk limit.
    pub fn allocation(&self, requested: Bytes, risk_limit: RiskLimit) -> RiskAllocation {
        self.curve.allocation(requested, risk_limit, self.owner_margin)
    }

    /// Joins the prediction with the outcome of its VM.
    pub fn with_outcome(self, request: &VmRequest, outcome: &Outcome) -> CalibrationSample {
        let Self { curve, owner_margin } = self;
        let (begins, requested, untouched) = (request.begins, request.requested, outcome.untouched);
        CalibrationSample { begins, curve, owner_margin, requested, untouched }
    }
}

impl OnlinePredictor {
    /// Predicts a VM that is about to start now.
    pub fn assess(&self, request: &VmRequest) -> VmAssessment {
        let features = self.history.features(request);
        let prediction = self.model.as_ref().map(|model| RiskPrediction {
            curve: model.curve(&features),
            owner_margin: self.calibration.owner_margin(request.groups.owner().as_ref()),
        });
        VmAssessment { features, prediction }
    }

    /// Records the outcome of a VM that ended. `prediction` is the one that the serving model made
    /// before the VM started, if it did; it feeds the calibration.
    pub fn record_outcome(
        &mut self,
        request: &VmRequest,
        outcome: &Outcome,
        prediction: Option<RiskPrediction>,
    ) {
        self.history.add(request, outcome);
        if let Some(prediction) = prediction {
            self.calibration.add(request.groups.owner(), prediction.with_outcome(request, outcome));
        }
    }

    /// Replaces the outcome history, dropping outcomes that have expired.
    pub fn set_history(&mut self, history: History) {
        self.history = history;
    }

    pub(super) fn model(&self) -> Option<&Model> {
        self.model.as_ref()
    }

    /// Replaces the model and keeps the calibration.
    pub(super) fn set_model(&mut self, model: Model) {
        self.model = Some(model);
    }

    /// Removes the model and its calibration.
    pub fn clear_model(&mut self) {
        self.model = None;
        self.calibration = Calibration::default();
    }

    /// Replaces the model and its calibration.
    pub fn install_model(&mut self, model: Model, calibration: Calibration) {
        self.model = Some(model);
        self.calibration = calibration;
    }

    /// Returns the calibration of the serving model.
    pub fn calibration(&self) -> &Calibration {
        &self.calibration
    }
}
