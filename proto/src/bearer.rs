//! Interceptor that sends a client's bearer token with each call.

use std::fmt;

use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue, errors::InvalidMetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};

/// Channel that adds the client's token, if there is one, to each call.
pub type ClientChannel = InterceptedService<Channel, Bearer>;

/// Interceptor that adds the header `authorization: Bearer TOKEN` to each call. The default has no
/// token and adds nothing.
#[derive(Clone, Default)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

impl Bearer {
    /// Creates an interceptor that sends `token`.
    ///
    /// # Errors
    /// [`InvalidMetadataValue`] if the token contains characters that are invalid in a header.
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
