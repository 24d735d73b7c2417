//! Tests of the policy.
