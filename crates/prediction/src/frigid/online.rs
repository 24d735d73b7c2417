//! Online predictor: predicts VMs that are about to start, from a model and the outcomes of earlier
//! VMs. It is updated when VMs end. The backtest and the pool manager use the same predictor, so
//! that backtest results apply to the served predictions.

use serde::{Deserialize, Serialize};
use units::Bytes;

use super::{
    calibration::{Calibration, CalibrationSample},
    history::{FEATURE_COUNT, OutcomeHistory},
    model::Model,
    outcome::{Outcome, VmRequest},
    risk::{QuantileCurve, RiskAllocation, RiskLimit},
};

/// Predictor with a history of outcomes, a serving model and its calibration. Without a model, it
/// computes features but makes no predictions.
#[derive(Clone, Debug, Default)]
pub struct OnlinePredictor {
    history: OutcomeHistory,
    model: Option<Model>,
    calibration: Calibration,
}

/// Features and prediction of a VM that is about to start.
#[derive(Clone, Debug, PartialEq)]
pub struct VmAssessment {
    /// Row of features; unknown features are NaN.
    pub features: [f64; FEATURE_COUNT],
    /// Prediction of the serving model, or `None` without a serving model.
    pub prediction: Option<RiskPrediction>,
}

/// Prediction of the untouched fraction of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RiskPrediction {
    /// Predicted quantiles of the untouched fraction.
    pub curve: QuantileCurve,
    /// Ratio of the observed to the expected rate of overpredictions of the VM's owner, at least 1.
    /// Risks are multiplied by this factor.
    #[serde(rename = "caution")]
    pub owner_margin: f64,
}

impl RiskPrediction {
    /// Returns the fraction of the VM's memory to allocate from the pool under a risk limit, and
    /// its risk.
    pub fn allocation(&self, requested: Bytes, risk_limit: RiskLimit) -> RiskAllocation {
        self.curve.allocation(requested, risk_limit, self.owner_margin)
    }

    /// Combines the prediction with the outcome of its VM into a calibration sample.
    pub fn with_outcome(self, request: &VmRequest, outcome: &Outcome) -> CalibrationSample {
        let Self { curve, owner_margin } = self;
        let (begins, requested, untouched) = (request.begins, request.requested, outcome.untouched);
        CalibrationSample { begins, curve, owner_margin, requested, untouched }
    }
}

impl OnlinePredictor {
    /// Computes the features and the prediction of a VM that is about to start.
    pub fn assess_vm(&self, request: &VmRequest) -> VmAssessment {
        let features = self.history.features(request);
        let prediction = self.model.as_ref().map(|model| RiskPrediction {
            curve: model.curve(&features),
            owner_margin: self.calibration.owner_margin(request.groups.owner().as_ref()),
        });
        VmAssessment { features, prediction }
    }

    /// Records the outcome of an ended VM. `prediction` is the prediction that the serving model
    /// made before the VM started, if any. If present, it updates the calibration.
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

    /// Replaces the history of outcomes, for example to drop expired outcomes.
    pub fn set_history(&mut self, history: OutcomeHistory) {
        self.history = history;
    }

    pub(super) fn model(&self) -> Option<&Model> {
        self.model.as_ref()
    }

    /// Replaces the model and keeps the calibration.
    pub(super) fn set_model(&mut self, model: Model) {
        self.model = Some(model);
    }

    /// Removes the serving model and its calibration.
    pub fn clear_model(&mut self) {
        self.model = None;
        self.calibration = Calibration::default();
    }

    /// Replaces the serving model and its calibration.
    pub fn install_model(&mut self, model: Model, calibration: Calibration) {
        self.model = Some(model);
        self.calibration = calibration;
    }

    /// Returns the calibration of the serving model.
    pub fn calibration(&self) -> &Calibration {
        &self.calibration
    }
}
