//! The store of an area, as long as its agent has the area: one that was released asks nothing more that would change the store, where
//! its successor goes on.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;
use store::{
    Body, Condition, Leftover, NoPlace, Part, Seen, Sink, SinkLimits, StoreError, Upload, Version, Write,
    WriteId, Written,
};

#[derive(Debug)]
pub(super) struct Fence {
    sink: Arc<dyn Sink>,
    released: Arc<AtomicBool>,
}

impl Fence {
    pub(super) fn new(sink: Arc<dyn Sink>, released: Arc<AtomicBool>) -> Self {
        Self { sink, released }
    }

    fn pass(&self) -> Result<&Arc<dyn Sink>, StoreError> {
        if !self.released.load(Acquire) {
            return Ok(&self.sink);
        }
        Err(StoreError::Unavailable {
            what: "the staging area".into(),
            waited: Duration::ZERO,
            queued: Duration::ZERO,
            attempts: 0,
            cause: "the next agent has it".into(),
        })
    }
}

#[async_trait::async_trait]
impl Sink for Fence {
    fn limits(&self) -> SinkLimits {
        self.sink.limits()
    }

    fn takes(&self, path: &[u8]) -> Result<(), NoPlace> {
        self.sink.takes(path)
    }

    async fn put(
        &self,
        path: &[u8],
        body: &Body,
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        self.pass()?.put(path, body, write, condition).await
    }

    async fn begin(&self, path: &[u8], write: &Write) -> Result<Upload, StoreError> {
        self.pass()?.begin(path, write).await
    }

    async fn part(&self, upload: &Upload, number: u32, body: &Body) -> Result<Part, StoreError> {
        self.pass()?.part(upload, number, body).await
    }

    async fn complete(
        &self,
        upload: &Upload,
        parts: &[Part],
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        self.pass()?.complete(upload, parts, condition).await
    }

    async fn abandon(&self, upload: &Upload) -> Result<(), StoreError> {
        self.pass()?.abandon(upload).await
    }

    async fn withdraw(
        &self,
        path: &[u8],
        write: WriteId,
        condition: Option<&Condition>,
    ) -> Result<(), StoreError> {
        self.pass()?.withdraw(path, write, condition).await
    }

    async fn leftovers(&self, age: Duration) -> Result<Vec<Leftover>, StoreError> {
        self.sink.leftovers(age).await
    }

    async fn look(&self, path: &[u8]) -> Result<Option<Seen>, StoreError> {
        self.sink.look(path).await
    }

    async fn delete(&self, path: &[u8], condition: &Condition) -> Result<(), StoreError> {
        self.pass()?.delete(path, condition).await
    }

    async fn copy(
        &self,
        from: &[u8],
        version: &Version,
        size: u64,
        to: &[u8],
        write: &Write,
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        self.pass()?.copy(from, version, size, to, write, condition).await
    }

    async fn make_dir(&self, path: &[u8], write: &Write) -> Result<(), StoreError> {
        self.pass()?.make_dir(path, write).await
    }

    async fn remove_dir(&self, path: &[u8]) -> Result<(), StoreError> {
        self.pass()?.remove_dir(path).await
    }
}
