//! Online predictor: predicts VMs that are about to start, from a model and the outcomes of earlier
//! VMs. It is updated when VMs end. The backtest and the pool manager use the same predictor, so
//! that backtest results apply to the served predictions.

use super::{
    calibration::{Calibration, CalibrationSample},
    history::{FEATURE_COUNT, OutcomeHistory, OwnerHistory},
    model::Model,
    outcome::{Outcome, VmRequest},
    risk::QuantileCurve,
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
    /// Predicted quantiles of the untouched fraction. `None` without a serving model, or if too few
    /// VMs of the owner have ended.
    pub prediction: Option<QuantileCurve>,
}

impl OnlinePredictor {
    /// Computes the features and the prediction of a VM that is about to start.
    pub fn assess_vm(&self, request: &VmRequest) -> VmAssessment {
        let features = self.history.features(request);
        let owner =
            OwnerHistory::find(&request.groups, &features).filter(|_| self.history.has_known_owner(request));
        let prediction =
            self.model.as_ref().zip(owner).map(|(model, owner)| model.curve(&features).limited_by(owner));
        VmAssessment { features, prediction }
    }

    /// Records the outcome of an ended VM. `prediction` is the prediction that the serving model
    /// made before the VM started, if any. If present, it updates the calibration.
    pub fn record_outcome(
        &mut self,
        request: &VmRequest,
        outcome: &Outcome,
        prediction: Option<QuantileCurve>,
    ) {
        self.history.add(request, outcome);
        if let Some(curve) = prediction {
            self.calibration.add(CalibrationSample::new(request, outcome, curve));
        }
    }

    /// Records the outcome of an ended VM in the history only, so that it neither trains nor
    /// calibrates a model.
    pub(super) fn record_history(&mut self, request: &VmRequest, outcome: &Outcome) {
        self.history.add(request, outcome);
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
