// The one attribute that decides what a shared libsherd shows. Everything else is hidden.
#pragma once

// Used on declarations only; a macro because attributes with arguments cannot be named otherwise.
#define SHERD_API [[gnu::visibility("default")]]
