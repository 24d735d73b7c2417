//! A client's bearer token, sent with each of its calls.

use std::fmt;

use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue, errors::InvalidMetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};

/// A channel whose calls carry the client's token, if it has one.
pub type ClientChannel = InterceptedService<Channel, Bearer>;

/// Interceptor that adds `authorization: Bearer TOKEN` to each call if there is a token.
#[derive(Clone, Default)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

impl Bearer {
    /// Returns an interceptor for this token.
    ///
    /// # Errors
    /// [`InvalidMetadataValue`] if the token has characters that a header cannot carry.
    pub fn new(token: &str) -> Result<Self, InvalidMetadataValue> {
        let mut value = MetadataValue::try_from(format!("Bearer {token}"))?;
        value.set_sensitive(true);
        Ok(Self(Some(value)))
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

impl fmt::Debug for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bearer").field(&self.0.as_ref().map(|_| "secret")).finish()
    }
}
