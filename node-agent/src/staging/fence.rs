//! The store of an area, as long as its agent has the area: one that was released asks nothing more that would change the store, where
//! its successor goes on.

use super::tenure::Tenure;
use std::sync::Arc;
use std::time::Duration;
use store::{
    Body, Condition, Leftover, NoPlace, Part, Seen, Sink, SinkLimits, StoreError, Upload, Version, Write,
    WriteId, Written,
};

#[derive(Debug)]
pub(super) struct Fence {
    sink: Arc<dyn Sink>,
    tenure: Arc<Tenure>,
}

impl Fence {
    pub(super) fn new(sink: Arc<dyn Sink>, tenure: Arc<Tenure>) -> Self {
        Self { sink, tenure }
    }

    /// What is in the air may come to pass, as after a death; nothing is tried again.
    async fn pass<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        tokio::select! {
            biased;
            () = self.tenure.ended() => Err(StoreError::Unavailable {
                what: "the staging area".into(),
                waited: Duration::ZERO,
                queued: Duration::ZERO,
                attempts: 0,
                cause: "the next agent has it".into(),
            }),
            done = call => done,
        }
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
        self.pass(self.sink.put(path, body, write, condition)).await
    }

    async fn begin(&self, path: &[u8], write: &Write) -> Result<Upload, StoreError> {
        self.pass(self.sink.begin(path, write)).await
    }

    async fn part(&self, upload: &Upload, number: u32, body: &Body) -> Result<Part, StoreError> {
        self.pass(self.sink.part(upload, number, body)).await
    }

    async fn complete(
        &self,
        upload: &Upload,
        parts: &[Part],
        condition: &Condition,
    ) -> Result<Written, StoreError> {
        self.pass(self.sink.complete(upload, parts, condition)).await
    }

    async fn abandon(&self, upload: &Upload) -> Result<(), StoreError> {
        self.pass(self.sink.abandon(upload)).await
    }

    async fn withdraw(
        &self,
        path: &[u8],
        write: WriteId,
        condition: Option<&Condition>,
    ) -> Result<(), StoreError> {
        self.pass(self.sink.withdraw(path, write, condition)).await
    }

    async fn leftovers(&self, age: Duration) -> Result<Vec<Leftover>, StoreError> {
        self.sink.leftovers(age).await
    }

    async fn look(&self, path: &[u8]) -> Result<Option<Seen>, StoreError> {
        self.sink.look(path).await
    }

    async fn delete(&self, path: &[u8], condition: &Condition) -> Result<(), StoreError> {
        self.pass(self.sink.delete(path, condition)).await
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
        self.pass(self.sink.copy(from, version, size, to, write, condition)).await
    }

    async fn make_dir(&self, path: &[u8], write: &Write) -> Result<(), StoreError> {
        self.pass(self.sink.make_dir(path, write)).await
    }

    async fn remove_dir(&self, path: &[u8]) -> Result<(), StoreError> {
        self.pass(self.sink.remove_dir(path)).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Does, Node, SOON, until};

    #[tokio::test(flavor = "multi_thread")]
    async fn who_waits_for_the_store_is_let_go_when_the_area_is_released() {
        let mut node = Node::new();
        node.does.send_replace(Does::Hangs);
        let area = node.area().await;
        let ino = node.write(&area, "a", b"bytes", true).await;
        let file = area.by_ino(ino).unwrap();
        let waiting = node.does.receiver_count();
        let sending = tokio::spawn({
            let area = area.clone();
            async move { area.send(&file).await }
        });
        until(|| node.does.receiver_count() > waiting).await; // each call that hangs has one
        area.tenure.end();
        let sent = tokio::time::timeout(SOON, sending).await.expect("it is let go");
        assert!(sent.unwrap().is_err());
        node.does.send_replace(Does::Takes);
        assert!(!node.store("a").exists());
    }
}
